"""What evicting methods keep, and their next logits, against kvpress on the reference model; needs the extra `oracles`.

kvpress prunes a prompt's cache after prefill. What it keeps is found by comparing its keys with those of an unpruned
run, so that nothing is asked of it but its cache. Intended differences, and how the tests meet them:

  - kvpress keeps no sinks but StreamingLLM's: sinks=0 elsewhere. Its window holds as many tokens as there are queries
    that vote; ours has the newest token in it too: window = window_size + 1.
  - our budget counts the token that is being decoded: it attends budget - 1 others.
  - while decoding kvpress prunes no more, and ours holds the budget: only the first decoded token is compared.
  - ChunkKVPress takes one set of chunks for all heads: `shared`. It scores with pooled votes: kernel_size=1 here. Its
    chunks go through the window, which our cut leaves out: the prompt is made of whole chunks before and in it.
  - ObservedAttentionPress divides what a token was paid by the number of queries that could see it, and keeps no recent
    tokens. H2O does not divide (Algorithm 1) and keeps them: `HeavyHitters` undoes the one and adds the other.
"""

import contextlib
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import decode

pytestmark = pytest.mark.oracles

REFERENCE = str(pathlib.Path(kvjax.__file__).parent / "reference")
LENGTH, KEPT, WINDOW, CHUNK = 240, 80, 20, 10


@pytest.fixture(scope="module")
def ours():
    return kvjax.load(REFERENCE)


@pytest.fixture(scope="module")
def theirs():
    """Their model for each method: only H2O's press needs attention weights, and ChunkKV's refuses them."""
    from transformers import AutoModelForCausalLM

    kinds = {kind: AutoModelForCausalLM.from_pretrained(REFERENCE, attn_implementation=kind).eval()
             for kind in ("eager", "sdpa")}
    return {name: kinds["eager" if name == "h2o" else "sdpa"] for name in METHODS}


@pytest.fixture(scope="module")
def tokens(ours):
    found = ours.encode(pathlib.Path(decode.__file__).read_text(), start=True)
    return found[: LENGTH + 1]


def presses():
    """A press of each kind that keeps KEPT of LENGTH tokens."""
    import torch
    from kvpress import ChunkKVPress, ObservedAttentionPress, SnapKVPress, StreamingLLMPress

    class HeavyHitters(ObservedAttentionPress):
        """H2O: sums instead of averages, and recent tokens whatever their sums."""

        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            mean = super().score(module, hidden_states, keys, values, attentions, kwargs)
            sums = mean * torch.arange(keys.shape[2], 0, -1)
            sums[..., -WINDOW:] = torch.inf
            return sums

    ratio = 1 - (KEPT + 0.5) / LENGTH  # rounded down
    return {
        "streaming_llm": StreamingLLMPress(ratio, n_sink=4),
        "snapkv": SnapKVPress(ratio, window_size=WINDOW, kernel_size=5),
        "chunkkv": ChunkKVPress(SnapKVPress(ratio, window_size=WINDOW, kernel_size=1), chunk_length=CHUNK),
        "h2o": HeavyHitters(ratio),
    }


COMMON = {"budget": KEPT + 1, "sinks": 0, "window": WINDOW + 1}
METHODS = {
    "streaming_llm": kvjax.streaming_llm(budget=KEPT + 1, sinks=4),
    "snapkv": kvjax.snapkv(**COMMON, observation=WINDOW, kernel=5),
    "chunkkv": kvjax.chunkkv(**COMMON, observation=WINDOW, chunk=CHUNK, shared=True),
    "h2o": kvjax.h2o(**COMMON),
}


def their_run(model, tokens, press=None):
    """Keys of each layer after the prompt `[K, N, D]`, and the logits of the token after it."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    ids = torch.tensor([tokens])
    with torch.no_grad(), press(model) if press else contextlib.nullcontext():
        model.model(input_ids=ids[:, :LENGTH], past_key_values=cache)
    keys = [layer.keys[0].numpy().copy() for layer in cache.layers]
    with torch.no_grad():
        # The mask is of true positions: all that is left in the cache is before the token.
        out = model(input_ids=ids[:, LENGTH:], past_key_values=cache, position_ids=torch.tensor([[LENGTH]]))
    return keys, out.logits[0, -1].numpy()


def positions_of(pruned, whole):
    """Where in the whole cache `[T, D]` each row of a pruned one is: it must be there once, to the last bit."""
    where = (pruned[:, None] == whole[None]).all(-1)
    assert (where.sum(-1) == 1).all()
    return set(where.argmax(-1).tolist())


@pytest.mark.parametrize("name", METHODS)
def test_the_same_tokens_are_kept_and_the_next_logits_are_theirs(ours, theirs, tokens, name):
    whole, _ = their_run(theirs[name], tokens)
    pruned, logits = their_run(theirs[name], tokens, presses()[name])
    cache = ours.prefill(tokens[:LENGTH], method=METHODS[name])
    for layer, keys, everything in zip(cache.state.layers, pruned, whole, strict=True):
        blocks, tail = np.asarray(layer.state.pos[0]), np.asarray(layer.state.tail.pos[0])
        for head in range(len(keys)):
            kept = {*blocks[head].ravel().tolist(), *tail[head].tolist()} - {-1}
            assert len(kept) == KEPT
            assert kept == positions_of(keys[head], everything[head])
    done = decode.step(cache.plan, ours.params, cache.state, jnp.asarray(tokens[LENGTH:]))
    np.testing.assert_allclose(done.logits[0], logits, rtol=0, atol=1e-3)


def test_dropping_tokens_shows_in_the_logits(theirs, tokens):
    """Given no press, the logits are others: the comparison above could have failed."""
    for name, press in presses().items():
        whole, pruned = (their_run(theirs[name], tokens, one)[1] for one in (None, press))
        assert np.abs(pruned - whole).max() > 0.05
