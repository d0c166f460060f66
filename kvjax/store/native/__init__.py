"""The compiled part of the store: fast fetches, appending the rows of a token, and programs' calls of Python functions.
"""

from kvjax import _native

native = _native.load("kvjax.store.native._compiled")  # None if not compiled: Python does the same, more slowly
