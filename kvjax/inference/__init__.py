"""Prefill, decoding and generation over all layers, and the cache that users hold."""
