"""The compiled part of the store; `None` where it was not compiled (`kvjax.cache.callbacks.native`)."""
