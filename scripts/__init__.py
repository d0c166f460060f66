"""Scripts that are run by hand: benchmarks, checks, goldens, conversions."""
