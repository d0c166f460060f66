"""Saving a cache to a directory, and restoring it in another process.

    DIRECTORY/state-HEX.safetensors   everything in the cache except a store's blocks
    DIRECTORY/blocks.kv               a store's blocks, as a store file (`kvjax.store.format.pages`)
    DIRECTORY/cache.json              only for a cache that is entirely in memory

A *manifest* (`kvjax.inference.saves.manifest`) says which state file is valid and how the cache was made. It is either
the metadata of the store file's commit, or `cache.json`, which is replaced by a rename. The state file is synced to the
device first, so this single step saves both or neither. State files that no manifest names are *strays*. A save removes
its own stray when it fails; the next save or restoration removes those of killed processes. If anything is damaged,
nothing is removed, because it may still be needed.
"""
