"""Reads and writes of a store file: system calls, engines, prefetch, emulated devices."""
