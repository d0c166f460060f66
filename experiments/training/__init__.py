"""Training of the reference model, and of low-rank adapters."""
