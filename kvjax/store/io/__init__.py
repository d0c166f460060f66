"""Input and output of a store file: system calls, engines, prefetch and emulated devices."""
