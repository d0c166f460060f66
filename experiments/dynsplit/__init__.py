"""Experiments of DynSplit-KV: importance of delimiters."""
