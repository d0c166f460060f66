"""Stores of blocks: interface, memory and flash. NumPy, files and C; never JAX."""
