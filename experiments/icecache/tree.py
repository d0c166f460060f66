"""The DCI-tree alone: recall against brute force, comparisons per query, and results of trees grown by inserts."""

import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments import common
from kvjax.eval.tasks import needles
from kvjax.methods import dci
from kvjax.methods.dci.tree import occupancy
from kvjax.ops.precise import matmul

Row = dict


def real_keys(llm: kvjax.LLM, config) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys [N, T, D] of a prompt and queries [N, Q, D] of the tokens after it, of every layer and KV head."""
    stream = common.held_out_tokens(llm)
    size = config.key_tokens + config.key_steps
    text = needles.random_span(np.random.default_rng(config.seed), stream, size)
    reading = llm.read(text[: config.key_tokens])
    cache = llm.prefill(reading, method=kvjax.Full(), capacity=size + 8)
    queries: list[np.ndarray] = []
    llm.generate(
        text[config.key_tokens :], cache, max_new_tokens=1,
        observer=lambda step, _: queries.append(np.stack([np.asarray(report.q)[0] for report in step.reports])),
    )
    key = np.concatenate([layer.key[0, : config.key_tokens].swapaxes(0, 1) for layer in reading.layers])
    query = np.stack(queries).transpose(1, 2, 0, 3, 4)  # layers, KV heads, steps, query heads, D
    return key, query.reshape(len(key), -1, key.shape[-1])


def made_up_points(kind: str, points: int, queries: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys [1, T, 64] and queries [1, Q, 64]: `clustered` around 256 centres, or `uniform` in a cube."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((1, queries, 64), np.float32)
    if kind == "uniform":
        return rng.uniform(-1, 1, (1, points, 64)).astype(np.float32), query
    centre = rng.standard_normal((256, 64), np.float32)
    noise = 0.4 * rng.standard_normal((points, 64), np.float32)
    return (centre[rng.integers(0, 256, points)] + noise)[None], query


SETTINGS = {  # each at every length, so that growth and recall are those of the same search
    "shipped": kvjax.IceCache(),
    "narrow": kvjax.IceCache(beam=64),
    "pdci48": kvjax.IceCache(ratio=1 / 32, beam=256, pages=384, projections=48, visit=338),
}


def rows(llm: kvjax.LLM, config) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Yields recall against brute force, evaluations per query, and occupancy; of trees built at once, and of trees
    built from a share `built` of the points and completed by inserts."""
    keys = functools.cache(lambda: real_keys(llm, config))
    sizes = [("real", config.key_tokens), *((kind, n) for kind in ("clustered", "uniform") for n in config.points)]
    grown = [("real", config.key_tokens), *((kind, config.grown_points) for kind in ("clustered", "uniform"))]
    jobs = [(*source, 1.0) for source in sizes] + [(*source, share) for source in grown for share in config.grown]
    for (kind, points, share), name in itertools.product(jobs, config.trees):
        def measured(kind=kind, points=points, share=share, name=name):
            points_and_queries = keys() if kind == "real" else made_up_points(kind, points, config.queries, config.seed)
            start = round(share * points)
            return _mean([tried(SETTINGS[name], start, *pair) for pair in zip(*points_and_queries, strict=True)])

        yield {"task": "dci", "method": name, "source": kind, "context": points, "built": share}, measured


def tried(method, start: int, key: np.ndarray, query: np.ndarray) -> Row:
    """Returns the figures of one head's tree, in the shape and with the searches of the method's cache."""
    points, size = key.shape
    spec = method.spec(kv_heads=1, group=1, head_dim=size, capacity=points)
    shape, searches = method.shape(spec), (method.search(method.insert_beam), method.search(method.beam))
    return {k: float(v) for k, v in _try(shape, *searches, start, jnp.asarray(key), jnp.asarray(query)).items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _try(shape: dci.Shape, inserting: dci.Search, search: dci.Search, start: int, key, query):
    """Returns means over queries. An evaluation is the product of a query with a key, or with a key's projections."""
    points = key.shape[0]
    tree, place = _grown(shape, inserting, start, key)
    number = jnp.full(shape.points, points, jnp.int32).at[place].set(jnp.arange(points))

    def one(q):
        found = dci.query(shape, search, tree, dci.transform_query(q[None]))
        places = number.at[found.point.reshape(-1)].get(mode="fill", fill_value=points)
        hit = jnp.zeros(points, bool).at[places].set(True, mode="drop")
        top = jax.lax.top_k(matmul(key, q), min(256, points))[1]
        recalls = {f"recall_{k}": jnp.mean(hit[top[:k]]) for k in (16, 64, 256)}
        bounds = jnp.sum(found.count) * (shape.projections > 0)
        return {**recalls, "visited": jnp.sum(hit), "bounds": bounds, "evaluations": jnp.sum(hit) + bounds}

    found = jax.tree.map(jnp.mean, jax.lax.map(one, query))
    return {**found, "visited_share": found["visited"] / points, "occupancy": occupancy(tree), "strays": tree.strays}


def _grown(shape: dci.Shape, search: dci.Search, start: int, key):
    """Returns a tree of the first `start` keys built at once and the others inserted, and the place of each point, page
    * C + row."""
    points = key.shape[0]
    level = dci.draw_levels(jax.random.key(1), jnp.arange(points), shape.ratio, shape.levels)
    tree, page, row = dci.build(shape, jax.random.key(0), key, jnp.arange(points) < start, level)

    def one(tree, given):
        tree, page, row = dci.insert(shape, search, tree, *given, jnp.bool_(True))
        return tree, page * shape.rows + row

    tree, later = jax.lax.scan(one, tree, (key[start:], level[start:]))
    return tree, jnp.concatenate([(page * shape.rows + row)[:start], later])


def _mean(rows: list[Row]) -> Row:
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
