"""Tools that look into store files."""
