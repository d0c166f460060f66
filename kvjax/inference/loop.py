"""The token loop as one program: feeds a question, draws an answer and commits every token, without the host between.

    given tokens:  feed a column, commit            (a question, or what was drawn last and is not fed yet)
    then:          draw; if a sequence goes on: feed what was drawn, commit; draw again ...

A token is `decode.fused_token`, and draws are those of `sampling`, so that answers are those of the other drivers. The
loop ends after a number of draws, where no sequence goes on, and where the host has to look: at a token that may end a
`stop` text, at logits that are not finite, at a token that could not be read or committed. What was drawn last is not
fed; the next run of the program is given it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import shared_slots
from kvjax.cache.layer import LayerCache
from kvjax.errors import ConfigError, StoreError
from kvjax.inference import decode, sampling
from kvjax.inference.commit import forget, settle, settle_inside, uses_store
from kvjax.inference.decode import Step
from kvjax.inference.layer_offload import is_offloaded
from kvjax.inference.plan import Plan, State
from kvjax.inference.sampling import Draw
from kvjax.inference.usage import LoopCounts
from kvjax.ops import barriers
from kvjax.typing import Array, Bool, Float, Int32, PRNGKey, PyTree, UInt, pytree

LEAST = 32  # tokens that the smallest program draws; streams are told of so many at once
GIVEN = 64  # tokens of each sequence that one run can be given
GOES_ON, ENDS, LOOK = 0, 1, 2  # what a token means to the loop; LOOK: the host has to see the answer's text first


@pytree
class LoopInput:
    """The request for one run of the loop."""

    given: Int32[Array, "B A"]  # token ids to feed first
    count: Int32[Array, "B"]  # given tokens of each sequence
    answering: Bool[Array, "B"]  # sequences whose answer has not ended
    meaning: UInt[Array, "V"]  # GOES_ON, ENDS or LOOK, of every token
    how: Draw
    key: PRNGKey
    first: Int32[Array, ""]  # draws of the answer before this run
    limit: Int32[Array, ""]  # draws of this run


@pytree
class LoopState:
    """The result of one run of the loop, and its carry from step to step."""

    state: State
    logits: Float[Array, "B V"]
    drawn: Int32[Array, "B N"]  # token ids; `sampling.NONE` for a sequence that had ended
    draws: Int32[Array, ""]  # columns of `drawn` that were drawn
    steps: Int32[Array, ""]  # tokens fed
    feed: Int32[Array, "B"]  # token ids of the next step
    active: Bool[Array, "B"]  # sequences that take part in it; the loop ends with none
    answering: Bool[Array, "B"]
    counted: LoopCounts
    read: Bool[Array, ""]  # False: the last step could not be read, and the state is the one before it
    committed: Bool[Array, ""]  # False: the last step is not in the store


def check(layers: tuple, observed: bool) -> None:
    """Raises ConfigError for layers that are offloaded, and for a run that is `observed` token by token."""
    if observed:
        raise ConfigError("observer= is called after every token, and driver='loop' runs many of them in one program; "
                          "use driver='fused'")
    if is_offloaded(layers):
        raise ConfigError("offloaded layers come and go between compiled parts; use driver='staged'")


def room(limit: int) -> int:
    """Returns the draws that a program has room for, given the number wanted: a power of two, so that programs are
    shared."""
    return max(LEAST, 1 << max(0, limit - 1).bit_length())


def asked(
    rows: list[list[int]], answering: np.ndarray, meaning: Array, how: Draw, key: Array, first: int, limit: int
) -> LoopInput:
    """Returns what a run is asked for, given the token ids to feed first, at most `GIVEN` in a row; arrays stay on the
    host until the program is called."""
    given, count = np.zeros((len(rows), GIVEN), np.int32), np.array(list(map(len, rows)), np.int32)
    for row, tokens in zip(given, rows, strict=True):
        row[: len(tokens)] = tokens
    numbers = np.asarray(first, np.int32), np.asarray(limit, np.int32)
    return LoopInput(given, count, answering, meaning, how, key, *numbers)  # type: ignore[arg-type]


def run(plan: Plan, params: PyTree, state: State, logits: Array, asked: LoopInput, most: int) -> LoopState:
    """Runs the loop once.

    Args:
      plan: what is static about the cache.
      params: the model's.
      state: the cache; its memory is reused, and the value must not be used again.
      logits: logits [B, V] of the next token.
      asked: what to feed, and what to draw.
      most: draws that the program has room for (`room`).

    Returns:
      The state after it, with every token that it fed committed, and what was drawn.

    Raises:
      StoreError: a read failed, or a commit; after a failed read its `state` is the cache before that token.
    """
    forget(state)
    piece = compiled(plan, most, params, state, logits, asked)
    if uses_store(piece.state) and not (piece.read and piece.committed):
        settle(piece.state, bool(piece.read))  # raises what the branch has kept
        raise StoreError("a token could not be committed, and the store kept no reason; ask again")
    return piece


def _loop(plan: Plan, most: int, params: PyTree, state: State, logits: Array, asked: LoopInput) -> LoopState:
    batch, nobody = plan.batch, jnp.zeros(plan.batch, bool)
    layers = shared_slots.made([layer for layer in state.layers if isinstance(layer, LayerCache)])  # none is offloaded
    state = dataclasses.replace(state, layers=tuple(layers))
    none, yes = jnp.zeros((asked.given.shape[1] + most, batch), jnp.int32), jnp.bool_(True)
    drawn = jnp.full((batch, most), sampling.NONE, jnp.int32)
    start = LoopState(
        state, logits, drawn, jnp.int32(0), jnp.int32(0), jnp.zeros(batch, jnp.int32), nobody, asked.answering,
        LoopCounts(none, none, none, none), yes, yes,
    )
    return jax.lax.while_loop(
        lambda piece: jnp.any(piece.active), functools.partial(_step, plan, params, asked), _following(asked, start)
    )


compiled = jax.jit(_loop, static_argnums=(0, 1), donate_argnums=3)


def _step(plan: Plan, params: PyTree, asked: LoopInput, piece: LoopState) -> LoopState:
    """Feeds a token, commits it and says what comes next."""
    params, feed = jax.lax.optimization_barrier((params, piece.feed))  # else XLA:CPU widens bfloat16 weights for good
    done = decode.fused_token(plan, params, piece.state, feed, piece.active)
    logits = jnp.where(piece.active[:, None], done.logits, piece.logits)
    state, committed = settle_inside(done.state, done.ok)
    counted = jax.tree.map(
        lambda all_steps, new: all_steps.at[piece.steps].set(new), piece.counted, _counted(done, piece.active)
    )
    return _following(asked, dataclasses.replace(
        piece, state=state, logits=barriers.rounded(logits), steps=piece.steps + 1, counted=counted, read=done.ok,
        committed=committed,
    ))


def _counted(done: Step, active: Bool[Array, "B"]) -> LoopCounts:
    """Returns the counts [B] of one step."""
    def total(counts):
        return functools.reduce(jnp.add, counts)

    attended = total([jnp.sum(report.attended, axis=1, dtype=jnp.int32) for report in done.reports])
    return LoopCounts(
        active.astype(jnp.int32), jnp.where(active, attended, 0),
        total([report.stats.requested for report in done.reports]),
        total([report.stats.missed for report in done.reports]),
    )


def _following(asked: LoopInput, piece: LoopState) -> LoopState:
    """Returns the piece with the tokens of the next step: the next given ones, or newly drawn ones."""
    given = piece.steps < jnp.max(asked.count)
    draws = piece.read & piece.committed & ~given & (piece.draws < asked.limit)
    token = jax.lax.cond(
        draws, lambda: sampling.draw(asked.how, piece.logits, jax.random.fold_in(asked.key, asked.first + piece.draws)),
        lambda: jnp.full_like(piece.feed, sampling.NONE),
    )
    meaning = jnp.where(token == sampling.NONE, LOOK, asked.meaning[jnp.maximum(token, 0)])
    answering, going = piece.answering, piece.answering & draws & (meaning != ENDS)
    looks = jnp.any(going & (meaning == LOOK))
    drawn = piece.drawn.at[:, piece.draws].set(jnp.where(answering, token, sampling.NONE), mode="drop")
    count = piece.draws + draws
    column = asked.given[:, jnp.minimum(piece.steps, asked.given.shape[1] - 1)]
    active = jnp.where(given, piece.steps < asked.count, going & ~looks & (count < asked.limit))
    return dataclasses.replace(
        piece, drawn=drawn, draws=count, feed=jnp.where(given, column, token),
        active=active & piece.read & piece.committed, answering=jnp.where(draws, going, answering),
    )
