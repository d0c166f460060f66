"""The reference model's tokenizer, and requests for it."""

import pathlib

import numpy as np
import pytest

import kvjax
from kvjax.eval.tasks import Request
from kvjax.models.tokenizer import TextTokenizer

TEXT = "The cat sat on the mat. It was warm there! Was it late? Nobody knew.\nThen it rained for a day.\n" * 150


@pytest.fixture(scope="session")
def tokenizer():
    return TextTokenizer.from_directory(pathlib.Path(kvjax.__file__).parent / "reference")


@pytest.fixture
def request_for(tokenizer):
    """A function that makes requests."""
    def make(length=600, count=3, seed=0, **more):
        return Request(tokenizer, TEXT, length, count, np.random.default_rng(seed), **more)

    return make
