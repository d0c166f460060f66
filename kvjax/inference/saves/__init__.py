"""Saving a cache to a directory, and restoring it in another process."""
