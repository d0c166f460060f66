"""Ways to keep keys in fewer bytes.

    rle.py          runs of consecutive equal keys
    block_runs.py   such runs inside the blocks of a flash store
    run_cache.py    a cache in memory that attends over runs
    dictionary.py   equal keys anywhere: by token id where that decides the key, or by content; repeated segments
    int8.py         one byte per element
    autoencoder.py  a learned projection
"""
