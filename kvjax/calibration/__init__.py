"""Settings fitted to a model or a device before it decodes: adapters, delimiters, KVSwap's tuner."""
