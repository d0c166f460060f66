"""The compiled part; everything else about the package is in setup.cfg. Without a C compiler it is left out, and reads
are made by threads (see kvjax/store/reader.py)."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("kvjax.store.native", ["kvjax/store/native.c"], optional=True)])
