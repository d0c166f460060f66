"""Multi-level Dynamic Continuous Indexing (IceCache, Algorithms 1 to 4): search for the largest inner products.

    tree, page, row = dci.build(shape, seed, key, valid, level)  # all points at once
    tree, page, row = dci.insert(shape, search, tree, key, level, valid)
    found = dci.query(shape, search, tree, dci.transform_query(q))

Functions take the keys of one head and are mapped over heads. Every array has a fixed shape.
"""

from kvjax.methods.dci.construction import build
from kvjax.methods.dci.insertion import insert, put_aside
from kvjax.methods.dci.levels import draw_levels
from kvjax.methods.dci.search import Found, Search, query
from kvjax.methods.dci.transform import transform_key, transform_query
from kvjax.methods.dci.tree import Shape, Tree, empty_tree

__all__ = [
    "Found", "Search", "Shape", "Tree", "build", "draw_levels", "empty_tree", "insert", "put_aside", "query",
    "transform_key", "transform_query",
]
