"""Experiments of the run-length cache: codecs of keys, their savings and their cost."""
