"""Our settings of the methods that kvpress has, too, and the comparison with what it keeps.

Intended differences, and how the settings meet them:

  - kvpress keeps no sinks but StreamingLLM's: sinks=0 elsewhere. Its window holds as many tokens as there are queries
    that vote; ours has the newest token in it too: window = window_size + 1.
  - our budget counts the token that is being decoded: it attends budget - 1 others.
  - while decoding kvpress prunes no more, and ours holds the budget: only the first decoded token is compared.
  - ChunkKVPress takes one set of chunks for all heads: `shared`. It scores with pooled votes: kernel_size=1 there. Its
    chunks go through the window, which our cut leaves out: the prompt is made of whole chunks before and in it.
  - ObservedAttentionPress divides what a token was paid by the number of queries that could see it, and keeps no recent
    tokens. H2O does not divide (Algorithm 1) and keeps them: `HeavyHitters` undoes the one and adds the other.
"""

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.inference import decode

NAMES = ("streaming_llm", "snapkv", "chunkkv", "h2o")


def method(name, kept, window, chunk):
    """Ours, which keeps as many tokens."""
    common = {"budget": kept + 1, "sinks": 0, "window": window + 1}
    return {
        "streaming_llm": lambda: kvjax.StreamingLLM(budget=kept + 1, sinks=4),
        "snapkv": lambda: kvjax.SnapKV(**common, observation=window, kernel=5),
        "chunkkv": lambda: kvjax.ChunkKV(**common, observation=window, chunk=chunk, shared=True),
        "h2o": lambda: kvjax.H2O(**common),
    }[name]()


def compare(llm, name, theirs):
    """Asserts that each KV head of each layer keeps the same tokens, and that the next logits are theirs."""
    kept, tokens = theirs[f"{name}_kept"], theirs["tokens"]
    length, count = kept.shape[-1], int(kept[0, 0].sum())
    ours = method(name, count, int(theirs["window"]), int(theirs["chunk"]))
    cache = llm.prefill(tokens[:length].tolist(), method=ours)
    for layer, expected in zip(cache.state.layers, kept, strict=True):
        blocks, tail = np.asarray(layer.state.pos[0]), np.asarray(layer.state.tail.pos[0])
        for head, row in enumerate(expected):
            found = {*blocks[head].ravel().tolist(), *tail[head].tolist()} - {-1}
            assert found == set(np.flatnonzero(row).tolist()) and len(found) == count
    done = decode.step(cache.plan, llm.params, cache.state, jnp.asarray(tokens[length:]))
    np.testing.assert_allclose(done.logits[0], theirs[f"{name}_logits"], rtol=0, atol=1e-3)
