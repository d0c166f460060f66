"""Experiments of DynaKV: distribution shift, layouts on flash, adaptive prefill."""
