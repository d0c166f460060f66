"""Settings fitted to a model or a device before decoding: adapters, delimiter weights, KVSwap's tuner."""
