"""Product quantisation as faiss 1.15.1 did it (`scripts/make_method_goldens.py`)."""

import pathlib

import numpy as np
import quantising


def test_codes_products_and_error_are_those_of_faiss():
    quantising.compare(dict(np.load(pathlib.Path(__file__).parents[1] / "goldens" / "pq.npz")))
