"""Product quantisation against faiss as it is installed; needs the extra `oracles`."""

import pytest
import quantising

pytestmark = pytest.mark.oracles


def test_codes_products_and_error_are_those_of_faiss():
    from scripts import make_method_goldens

    quantising.compare(make_method_goldens.quantised())
