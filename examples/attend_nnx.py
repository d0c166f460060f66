"""A Flax NNX model that decodes with kvjax: four layers in one scan, their weights and their caches stacked.

    python examples/attend_nnx.py

The cache of a layer is a pytree of arrays, so that caches of equal layers stack along a new axis, and `nnx.scan` takes
layers and caches one after another: the program holds the code of one layer, however many there are.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax

LAYERS, HEADS, KV_HEADS, SIZE, WIDTH, VOCAB = 4, 4, 2, 32, 64, 100
PROMPT, STEPS, PAGE = 128, 16, 4


def rotate(x, position):
    angle = position[..., None, None] * 10_000.0 ** (-jnp.arange(0, SIZE, 2) / SIZE)
    (first, second), cos, sin = jnp.split(x, 2, axis=-1), jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.q, self.k, self.v = (
            nnx.LinearGeneral(WIDTH, (heads, SIZE), rngs=rngs) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.out = nnx.LinearGeneral((HEADS, SIZE), WIDTH, axis=(-2, -1), rngs=rngs)

    def __call__(self, x, position, attention):
        normed = self.norm(x)
        attended, cache = attention(rotate(self.q(normed), position), rotate(self.k(normed), position), self.v(normed))
        return x + self.out(attended), cache


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.norm = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.layers = nnx.vmap(Layer)(rngs.split(LAYERS))

    def __call__(self, token, position, attention, caches):
        def layer(x, module_and_cache):
            module, cache = module_and_cache
            return module(x, position, partial(attention, cache))

        x, caches = nnx.scan(layer)(self.embed(token), (self.layers, caches))
        return self.embed.attend(self.norm(x)), caches


def dense(cache, q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), cache


def fill(cache, q, k, v):
    return dense(cache, q, k, v)[0], kvjax.prefill_cache(cache, k, v, jnp.full(len(k), k.shape[1]), query=q)


def fill_marked(cache, q, k, v):
    """Fills with values that are 1 at the number of the token's page, so that what is attended shows their shares."""
    marks = jax.nn.one_hot(jnp.arange(PROMPT) // PAGE, SIZE)[:, None]
    return fill(cache, q, k, jnp.broadcast_to(marks, v.shape))


def attend_marked(cache, q, k, v):
    shares, _ = kvjax.attend(cache, q, k, jnp.zeros_like(v))
    return shares, shares


@nnx.jit(static_argnames="attention")
def read(model, attention, tokens, caches):
    """Reads whole sequences [B, T]."""
    return model(tokens, jnp.arange(tokens.shape[1])[None], attention, caches)


@nnx.jit(static_argnames="attention")
def feed(model, attention, tokens, caches):
    """Feeds a token of each sequence [B]; as everything in the caches, `length` is stacked: [LAYERS, B]."""
    return model(tokens, caches.length[0], attention, caches)


def main() -> dict[int, float]:
    """Returns the largest difference of the logits from dense attention's, by budget."""
    model, tokens = Model(nnx.Rngs(0)), jax.random.randint(jax.random.key(1), (2, PROMPT + STEPS), 0, VOCAB)
    exact, _ = read(model, dense, tokens, None)
    differences = {}
    for budget in (PROMPT + STEPS, 48):
        cache = kvjax.init_cache(
            kvjax.Quest(budget=budget, sinks=4, window=8, page=PAGE), batch=2, kv_heads=KV_HEADS,
            group=HEADS // KV_HEADS, head_dim=SIZE, capacity=PROMPT + STEPS,
        )
        empty = jax.tree.map(lambda leaf: jnp.stack([leaf] * LAYERS), cache)
        _, caches = read(model, fill, tokens[:, :PROMPT], empty)
        differences[budget] = 0.0
        for at in range(PROMPT, PROMPT + STEPS):
            logits, caches = feed(model, kvjax.attend, tokens[:, at], caches)
            differences[budget] = max(differences[budget], float(jnp.abs(logits - exact[:, at]).max()))
        _, marked = read(model, fill_marked, tokens[:, :PROMPT], empty)
        _, shares = feed(model, attend_marked, tokens[:, PROMPT], marked)
        print(f"budget {budget}: logits differ by at most {differences[budget]:.1e}; the first token attends")
        for head in range(HEADS):  # of the first layer and sequence
            print(f"  in head {head} the pages", "".join("#" if share > 0 else "." for share in shares[0, 0, head]))
    return differences


if __name__ == "__main__":
    main()
