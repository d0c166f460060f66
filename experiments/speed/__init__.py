"""Timed runs: throughput, decoding of real text, parts of a layer, raw reads, replayed selections."""
