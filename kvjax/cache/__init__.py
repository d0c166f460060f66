"""The cache of one layer, the contract of methods, and the calls of the store from compiled programs."""
