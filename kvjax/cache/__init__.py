"""The cache of one layer, the contract of methods, and the only door to the store."""
