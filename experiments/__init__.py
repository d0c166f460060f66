"""Experiments of the papers and of the library, run by `experiments.main` from a configuration."""
