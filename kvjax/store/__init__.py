"""Stores of blocks: their interface, in memory and on flash. NumPy, files and C; never JAX."""
