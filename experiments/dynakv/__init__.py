"""Experiments of DynaKV: layouts on flash, adaptive prefill."""
