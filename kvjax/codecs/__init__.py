"""Ways to keep keys in fewer bytes.

    rle.py          runs of consecutive equal keys
    block_runs.py   such runs inside the blocks of a flash store
    dictionary.py   equal keys anywhere: by token id where that decides the key, or by content; repeated segments
    sorted_runs.py  runs of keys that were sorted by cluster
    lowbit.py       8, 4 or 2 bits per element
    autoencoder.py  a learned projection
"""
