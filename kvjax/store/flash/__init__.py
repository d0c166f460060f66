"""The flash store: its file, branches, write-behind and recovery."""
