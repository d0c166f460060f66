"""Decoder-only transformers, their checkpoints and tokenizers."""
