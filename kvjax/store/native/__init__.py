"""The compiled part of the store: quick fetches, rows that a token adds, and programs that call back."""

from kvjax import _native

native = _native.load("kvjax.store.native._compiled")  # None: Python does the same, slower
