"""Tasks, metrics, and the adapter for lm-evaluation-harness."""
