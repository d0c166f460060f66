"""A Flax Linen model that decodes with kvjax: two layers, grouped queries, rotary positions, prompts of two lengths.

    python examples/attend_linen.py

The model is given its attention, a function of (cache, q, k, v), and knows nothing of kvjax. Dense attention reads the
prompts while the caches are filled; `kvjax.attend` is the attention of every token after that.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

import kvjax

HEADS, KV_HEADS, SIZE, WIDTH, VOCAB = 4, 2, 32, 64, 100
PROMPT, STEPS, PAGE = 128, 16, 4


def rotate(x, position):
    angle = position[..., None, None] * 10_000.0 ** (-jnp.arange(0, SIZE, 2) / SIZE)
    (first, second), cos, sin = jnp.split(x, 2, axis=-1), jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, position, attention):
        normed = nn.RMSNorm()(x)
        q, k, v = (nn.DenseGeneral((heads, SIZE))(normed) for heads in (HEADS, KV_HEADS, KV_HEADS))
        attended, cache = attention(rotate(q, position), rotate(k, position), v)
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1))(attended)
        return x + nn.Dense(WIDTH)(nn.silu(nn.Dense(2 * WIDTH)(nn.RMSNorm()(x)))), cache


class Model(nn.Module):
    @nn.compact
    def __call__(self, token, position, attention, caches):
        embed = nn.Embed(VOCAB, WIDTH)
        x, after = embed(token), []
        for cache in caches:  # one for each layer
            x, cache = Layer()(x, position, partial(attention, cache))
            after.append(cache)
        return embed.attend(nn.RMSNorm()(x)), after


def dense(cache, q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), cache


def fill(length, cache, q, k, v):
    return dense(cache, q, k, v)[0], kvjax.prefill_cache(cache, k, v, length, query=q)


def read(params, prompts, length, caches, filling=fill):
    """Reads prompts [B, T], padded on the right; returns the token that follows each, and filled caches."""
    logits, caches = Model().apply(params, prompts, jnp.arange(PROMPT)[None], partial(filling, length), caches)
    return jnp.argmax(logits[jnp.arange(len(length)), length - 1], axis=-1), caches


@jax.jit
def answer(params, prompts, length, caches):
    """Decodes greedily; returns the tokens [STEPS, B] that were fed, and the logits after each."""
    def step(carry, _):
        token, caches = carry
        logits, caches = Model().apply(params, token, caches[0].length, kvjax.attend, caches)
        return (jnp.argmax(logits, axis=-1), caches), (token, logits)

    return jax.lax.scan(step, read(params, prompts, length, caches), length=STEPS)[1]


@jax.jit
def exact(params, prompts, length, tokens):
    """Returns what dense attention gives after each of these tokens."""
    row, at = jnp.arange(len(length)), length + jnp.arange(STEPS)[:, None]
    whole = jnp.pad(prompts, ((0, 0), (0, STEPS))).at[row, at].set(tokens)
    return Model().apply(params, whole, jnp.arange(PROMPT + STEPS)[None], dense, [None, None])[0][row, at]


@jax.jit
def pages_attended(params, prompts, length, caches):
    """Returns how much of each page the first answer token attends in the first layer, [B, H, pages].

    The values are marks here, 1 at the number of the token's page, so that what is attended adds up to these shares.
    """
    marks = jax.nn.one_hot(jnp.arange(PROMPT) // PAGE, SIZE)[:, None]

    def shares(cache, q, k, v):
        out, _ = kvjax.attend(cache, q, k, jnp.zeros_like(v))
        return out, out

    token, caches = read(
        params, prompts, length, caches,
        lambda length, cache, q, k, v: fill(length, cache, q, k, jnp.broadcast_to(marks, v.shape)),
    )
    return Model().apply(params, token, caches[0].length, shares, caches)[1][0]


def main() -> dict[int, float]:
    """Returns the largest difference of the logits from dense attention's, by budget."""
    prompts, length = jax.random.randint(jax.random.key(0), (2, PROMPT), 0, VOCAB), jnp.array([PROMPT, 90])
    params = Model().init(jax.random.key(1), prompts, jnp.arange(PROMPT)[None], dense, [None, None])
    sizes = {"batch": 2, "kv_heads": KV_HEADS, "group": HEADS // KV_HEADS, "head_dim": SIZE}
    differences = {}
    for budget in (PROMPT + STEPS, 48):
        method = kvjax.Quest(budget=budget, sinks=4, window=8, page=PAGE)
        caches = [kvjax.init_cache(method, **sizes, capacity=PROMPT + STEPS)] * 2
        tokens, logits = answer(params, prompts, length, caches)
        differences[budget] = float(jnp.abs(logits - exact(params, prompts, length, tokens)).max())
        print(f"budget {budget}: logits differ by at most {differences[budget]:.1e}; the first answer token attends")
        for head, shares in enumerate(pages_attended(params, prompts, length, caches)[0]):
            print(f"  in head {head} the pages", "".join("#" if share > 0 else "." for share in shares))
    return differences


if __name__ == "__main__":
    main()
