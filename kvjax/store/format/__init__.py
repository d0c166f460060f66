"""The bytes of a store file: pages, block codecs and the allocation of extents."""
