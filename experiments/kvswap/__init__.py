"""Experiments of KVSwap: tuner, reuse, residency policies, overlap of reading and computing."""
