"""Both drivers over a whole model: against dense logits, against each other, across stores."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, UNLIKE, compiled, either, plan_of
from tiny import CAPACITY, CONFIG, PROMPT, decoded, dense, start, temporaries

from kvjax.cache import callbacks
from kvjax.cache import state as caching
from kvjax.cache.fill import empty_state
from kvjax.cache.types import Selection, Spec
from kvjax.cache.write import _due_blocks, write_token
from kvjax.errors import ConfigError, NoSpace, PromptError, StaleCache, WriteFailed
from kvjax.inference import decode, dense_prefill, layer_offload, prefill
from kvjax.inference.lookahead import Token
from kvjax.inference.plan import Slots, make_plan, store_geometry
from kvjax.models.transformer import Block
from kvjax.store.flash.store import FlashStore
from kvjax.store.host import HostStore

STEPS = 20


def teacher_forced(params, tokens, method, driver="staged", store=None, steps=STEPS, config=CONFIG, **slots):
    """Logits `[steps, B, V]` after each of the next tokens."""
    plan, state, _, branch = start(params, tokens, method, store, config, **slots)
    logits = decoded(plan, params, state, tokens, steps, driver)[1]
    if branch is not None:
        branch.close()
    return logits


@pytest.mark.parametrize("driver", ["staged", "fused"])
def test_full_cache_equals_dense_logits(params, tokens, driver):
    """In a layer with a sliding window and in one without."""
    config = dataclasses.replace(CONFIG, windows=(16, None))
    expected = dense(params, tokens, config)
    plan, _, logits, _ = start(params, tokens, METHODS["full"], config=config)
    assert [one.spec.sliding for one in plan.layers] == [16, None]
    got = teacher_forced(params, tokens, METHODS["full"], driver, config=config)
    for b, prompt in enumerate(PROMPT):
        np.testing.assert_allclose(logits[b], expected[b, prompt - 1], atol=1e-4)
        np.testing.assert_allclose(got[:, b], expected[b, prompt : prompt + STEPS], atol=1e-4)


def _due_together(plan):
    """Returns how many blocks a method sees the rows of at once when it adapts."""
    if not plan.method.adaptive:
        return 0
    return jax.eval_shape(lambda: _due_blocks(plan, empty_state(plan, 1), jnp.ones(1, bool))).shape[-1]


def _as_driven(method):
    return {
        "attends_all": method.attends_all, "adaptive": method.adaptive, "due": _due_together(plan_of(method)),
        "keeps_keys": method.keeps_keys, "observes": method.observes, "samples": method.samples,
        "evicts": method.evicts, "head_shared": method.head_shared,
        "places_alike": method.places_alike, "in_order": method.in_order, "observation": method.observed != 0,
        "weights": bool(jax.tree.leaves(method.weights(0))), "blocks": plan_of(method).spec.selected_rows > 0,
    }.items()


def test_whatever_a_driver_can_tell_of_a_method_is_tried():
    seen, every = ({item for name in names for item in _as_driven(METHODS[name])} for names in (UNLIKE, METHODS))
    assert seen == every


STORED = ("full", "quest", "dynakv")  # of these, a program has both layers in it; of the others the first one
SINGLE = dataclasses.replace(CONFIG, num_layers=1, windows=(None,))


@pytest.mark.parametrize("name", UNLIKE)
def test_drivers_agree(params, tokens, name, tmp_path):
    """The least alike of the four ways to decode: layer by layer in memory, and in one program on flash."""
    config = CONFIG if name in STORED else SINGLE
    staged = teacher_forced(params, tokens, METHODS[name], config=config)
    fused = teacher_forced(params, tokens, METHODS[name], "fused", FlashStore(directory=tmp_path), config=config)
    np.testing.assert_array_equal(staged.argmax(-1), fused.argmax(-1))
    np.testing.assert_allclose(staged, fused, atol=1e-4)


def test_drivers_give_equal_logits_in_bfloat16(params, tokens):
    """Rounds between layers: in one program XLA would compute on with what was to be rounded there."""
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    staged, fused = (teacher_forced(narrow, tokens, METHODS["quest"], one, steps=4) for one in ("staged", "fused"))
    np.testing.assert_array_equal(staged, fused)


@pytest.mark.parametrize("driver", ["staged", "fused"])
@pytest.mark.parametrize("name", STORED)
def test_stores_agree_bit_by_bit(params, tokens, name, driver, tmp_path):
    """In one driver; that every method does so in a layer is law 5."""
    in_memory = teacher_forced(params, tokens, METHODS[name], driver)
    on_flash = teacher_forced(params, tokens, METHODS[name], driver, FlashStore(directory=tmp_path))
    np.testing.assert_array_equal(in_memory, on_flash)


@pytest.mark.parametrize("layout", ["dual_head", "sequential"])
def test_layouts_agree(params, tokens, layout, tmp_path):
    store = FlashStore(directory=tmp_path, layout=layout, staging_bytes=0)
    expected = teacher_forced(params, tokens, METHODS["dynakv"])
    np.testing.assert_array_equal(expected, teacher_forced(params, tokens, METHODS["dynakv"], store=store))


class Asking(HostStore):
    """A store whose layout wants to see the retrievals of eight queries, and keeps what it is told."""

    def create(self, geometry, fingerprint):
        branch = super().create(geometry, fingerprint)
        branch.samples, self.prompts, write = 8, [], branch.write_layer

        def write_layer(layer, blocks, counts, prompt=None):
            self.prompts.append(prompt)
            write(layer, blocks, counts)

        branch.write_layer = write_layer
        return branch


@functools.partial(jax.jit, static_argnums=0)
def _needed(plan, params, state, b, token, at):
    """Returns what one query of a sequence would fetch in layer 0."""
    x = params["embedding"]["embedding"][token]
    q, _, _ = Block(CONFIG.layers[0]).apply({"params": params["layers_0"]}, x[None], at[None], method="project")
    one, (spec, method) = jax.tree.map(lambda leaf: leaf[b], state), (plan.layers[0].spec, plan.layers[0].method)
    selection = method.select(spec, one.index, caching.view(spec, one), q.reshape(2, 2, -1))
    return caching.needed_blocks(spec, one, selection)[0]


@pytest.mark.parametrize("method", [METHODS["quest"], METHODS["dynakv"]], ids=lambda m: m.name)
def test_a_layout_is_told_what_the_prompt_would_retrieve(params, tokens, method):
    """Layer 0 against a query at a time: eight of the second half of either prompt."""
    store = Asking()
    plan, state, _, _ = start(params, tokens, method, store)
    told, spec = store.prompts[0], plan.layers[0].spec
    assert len(store.prompts) == 2 and told.retrieved.shape == (2, 8, 2, spec.max_blocks + 1)
    np.testing.assert_array_equal(told.pos, state.layers[0].state.pos)
    for b, length in enumerate(PROMPT):
        stride = max(1, length // 16)
        for i, at in enumerate(range(length - 1, length - 1 - 8 * stride, -stride)):
            need = _needed(plan, params, state.layers[0].state, b, tokens[b, at], np.int32(at))
            np.testing.assert_array_equal(told.retrieved[b, i], need)


@pytest.mark.parametrize(("budget", "rows"), [(11, 4), (8, 2)])
def test_held_rows_cost_selected_ones_only_what_the_budget_lacks(budget, rows):
    """Given three held rows beside one block of four, with room for eight tokens beside sinks and window, or five."""
    spec = Spec(1, 1, 2, num_blocks=4, block_rows=4, max_blocks=1, held=3, sinks=1, window=2, budget=budget,
                capacity=16, tables=1, block_heads=1)
    empty = caching.empty_layer(spec, (), jnp.float32)
    tail = dataclasses.replace(empty.tail, pos=empty.tail.pos.at[0, -spec.held :].set(9))
    full = dataclasses.replace(empty, tail=tail, counts=empty.counts + np.uint8(4))
    selection = Selection(jnp.zeros((1, 1), jnp.int32), jnp.full(1, spec.num_blocks, jnp.int32))
    assert caching.needed_blocks(spec, full, selection)[1].valid.sum() == rows


def cut_by_hand(spec: Spec, chosen, force, counts, positions):
    """Returns the blocks to fetch and the attended (rank, row, position) of one head, token by token."""
    need, rows, room = [], [], min(spec.selected_rows, spec.budget - spec.sinks - spec.window)
    for rank, block in enumerate(chosen):
        count = counts[block] if block < spec.num_blocks else 0
        took = min(count, room - len(rows))
        need.append(block if took > 0 else spec.num_blocks)
        rows += [(rank, row, positions[block, row]) for row in range(max(took, 0))]
    return [*need, spec.num_blocks if force in need else force], rows


@pytest.mark.parametrize("budget", [9, 16, 24])
@pytest.mark.parametrize("tables", [1, 4])
def test_a_selection_is_cut_to_the_rows_that_fit(tables, budget):
    """Given blocks of which none is chosen twice, some of them empty, and ranks without a block."""
    spec = Spec(kv_heads=4, group=2, head_dim=8, num_blocks=12, block_rows=5, max_blocks=6, held=0, sinks=2, window=4,
                budget=budget, capacity=60, tables=tables, block_heads=4 if tables > 1 else 1)
    empty, cut = caching.empty_layer(spec, (), jnp.float32), jax.jit(functools.partial(caching.needed_blocks, spec))
    for seed in range(50):
        rng = np.random.default_rng(seed)
        chosen = np.stack([rng.permutation(12)[:6] for _ in range(4)]).astype(np.int32)
        chosen = np.where(rng.random(chosen.shape) < rng.choice([0, 0.3]), 12, chosen).astype(np.int32)
        force = rng.integers(0, 13, 4).astype(np.int32)
        counts = rng.integers(0, 6, (tables, 12)).astype(empty.counts.dtype)
        positions = rng.permutation(tables * 60).reshape(tables, 12, 5).astype(np.int32)
        layer = dataclasses.replace(empty, counts=counts, positions=positions)
        need, rows = jax.device_get(cut(layer, Selection(chosen, force)))
        for k in range(4):
            blocks, expected = cut_by_hand(spec, chosen[k], force[k], counts[k % tables], positions[k % tables])
            valid = rows.valid[k]
            assert need[k].tolist() == blocks
            assert list(zip(rows.rank[k][valid], rows.row[k][valid], rows.pos[k][valid], strict=True)) == expected
            assert (rows.pos[k][~valid] == -1).all()


def test_queries_are_not_sampled_for_who_does_not_ask(params, tokens):
    store = Asking()
    start(params, tokens, METHODS["full"], store)
    assert store.prompts[0].retrieved is None, "it retrieves everything, always"


def test_a_sliding_window_holds_for_selected_rows(params, tokens):
    config = dataclasses.replace(CONFIG, windows=(16, 16))
    method = dataclasses.replace(METHODS["quest"], budget=CAPACITY, max_blocks=1000)
    got = teacher_forced(params, tokens, method, config=config)
    expected = dense(params, tokens, config)
    np.testing.assert_allclose(got[:, 0], expected[0, PROMPT[0] : PROMPT[0] + STEPS], atol=1e-4)


@pytest.mark.parametrize("name", ["quest", "kvswap", "oracle"])
def test_no_budget_goes_to_blocks_that_a_sliding_window_hides(params, tokens, name):
    """Given windows of which two pages are beyond the recent tokens."""
    config = dataclasses.replace(CONFIG, windows=(16, 16))
    plan, state, _, _ = start(params, tokens, METHODS[name], config=config)
    page = plan.layers[0].spec.block_rows
    for i in range(4):
        at = np.asarray(state.length)[:, None, None]
        done = decode.step(plan, params, state, tokens[np.arange(2), np.asarray(PROMPT) + i])
        for report in done.reports:
            selected = np.asarray(report.selected)
            assert (selected >= 0).any()
            assert ((selected < 0) | (selected > at - 16 - page)).all()
        state = done.state


@pytest.mark.parametrize("name", ["h2o", "snapkv", "chunkkv", "sentencekv"])
def test_what_a_sliding_window_hides_is_not_kept(params, tokens, name):
    """Neither of the prompt, nor while a token that is seen wants its row."""
    config = dataclasses.replace(CONFIG, windows=(16, 16))
    plan, state, _, _ = start(params, tokens, METHODS[name], config=config)
    for i in range(12):
        at = np.asarray(state.length)[:, None, None]
        done = decode.step(plan, params, state, tokens[np.arange(2), np.asarray(PROMPT) + i])
        for report in done.reports:
            selected = np.asarray(report.selected)
            assert (selected >= 0).any() or i
            assert i or ((selected < 0) | (selected > at - 16)).all()
        state = done.state
    if name != "sentencekv":  # which drops nothing after the prompt
        middle = np.asarray(state.length)[:, None] - 16 + 1 + np.arange(16 - plan.layers[0].spec.window)
        for one in state.layers:
            pos = np.asarray(one.state.pos).reshape(*one.state.pos.shape[:2], -1)
            assert all(np.isin(middle[b], pos[b, head]).all() for b, head in np.ndindex(pos.shape[:2]))


def test_dense_layers_stay_in_memory_and_exact(params, tokens, tmp_path):
    method = dataclasses.replace(METHODS["quest"], dense_layers=1)
    plan, state, _, branch = start(params, tokens, method, FlashStore(directory=tmp_path))
    assert [type(one.pool).__name__ for one in state.layers] == ["MemoryPool", "SlotPool"]
    decode.step(plan, params, state, tokens[:, 0], donate=True)
    assert branch.stats().blocks_read > 0


def test_a_pure_step_leaves_its_state_usable(params, tokens):
    plan, state, _, _ = start(params, tokens, METHODS["quest"])
    first = decode.step(plan, params, state, tokens[:, 50])
    again = decode.step(plan, params, state, tokens[:, 50])
    np.testing.assert_array_equal(first.logits, again.logits)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("driver", ["staged", "fused"])
def test_inputs_on_the_host_may_be_changed_after_the_call(params, tokens, driver):
    """The step may look at them when it has returned. Aligned memory is what JAX would take for its own."""
    plan, state, _, _ = start(params, tokens, METHODS["quest"])
    expected = decode.step(plan, params, state, tokens[:, 50], jnp.asarray([True, False]), driver=driver)
    room = np.zeros(256, np.uint8)
    room = room[-room.ctypes.data % 64 :]
    fed, active = room[:8].view(np.int32), room[64:66].view(bool)
    for _ in range(5):
        fed[:], active[:] = np.asarray(tokens[:, 50]), [True, False]
        found = decode.step(plan, params, state, fed, active, driver=driver)
        fed[:], active[:] = 1, [False, True]
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_old_value_over_a_moved_store_is_stale(params, tokens, tmp_path):
    plan, state, _, _ = start(params, tokens, METHODS["quest"], FlashStore(directory=tmp_path))
    new = decode.step(plan, params, state, tokens[:, 50]).state
    with pytest.raises(StaleCache):
        decode.step(plan, params, state, tokens[:, 51])
    decode.step(plan, params, new, tokens[:, 51])


def test_another_token_may_be_tried_after_a_commit_that_failed(params, tokens, monkeypatch):
    """Puts what it would have put if the first step had never been."""
    def put(fails: bool) -> tuple[int, np.ndarray]:
        plan, state, _, branch = start(params, tokens, METHODS["dynakv"], HostStore())
        if fails:
            with monkeypatch.context() as failing, pytest.raises(NoSpace, match="full") as caught:
                failing.setattr(branch, "_publish", refuse)
                decode.step(plan, params, state, tokens[:, 0])
            assert caught.value.state is None
        done = decode.step(plan, params, state, tokens[:, 1])
        return branch.stats().bytes_put, np.asarray(done.logits)

    def refuse(records):
        raise NoSpace("full")

    (bytes_put, logits), (expected_bytes, expected) = put(True), put(False)
    assert bytes_put == expected_bytes
    np.testing.assert_array_equal(logits, expected)


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("offloaded", [False, True])
def test_of_a_token_that_ctrl_c_ended_nothing_is_left(params, tokens, monkeypatch, offloaded):
    """Whether it comes before the token is committed, or amid offloaded layers that were put back."""
    def logits(interrupted: bool) -> np.ndarray:
        slots = {"offload": HostStore()} if offloaded else {}
        plan, state, _, branch = start(params, tokens, METHODS["dynakv"], HostStore(), **slots)
        out = []
        for i in range(8):
            if interrupted and i == 3:
                with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                    target = (layer_offload.LayerLoader, "commit") if offloaded else (decode, "settle")
                    patched.setattr(*target, interrupt)
                    decode.step(plan, params, state, tokens[:, 0])
            done = decode.step(plan, params, state, tokens[:, i])
            state = done.state
            out.append(np.asarray(done.logits))
        branch.close()
        return np.stack(out)

    np.testing.assert_array_equal(logits(interrupted=True), logits(interrupted=False))


@pytest.mark.parametrize(("driver", "backend"), [("staged", "buffer"), ("fused", "buffer"), ("fused", "io")])
@pytest.mark.parametrize("call", ["_load", "_check"])
def test_ctrl_c_amid_a_callback_stays_ctrl_c(params, tokens, monkeypatch, driver, backend, call):
    plan, state, _, branch = start(params, tokens, METHODS["quest"], HostStore(), backend=backend)
    expected = decode.step(plan, params, state, tokens[:, 1], driver=driver).logits
    plan, state, _, branch = start(params, tokens, METHODS["quest"], HostStore(), backend=backend)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(branch, call, interrupt)
        decode.step(plan, params, state, tokens[:, 0], driver=driver)
    np.testing.assert_array_equal(decode.step(plan, params, state, tokens[:, 1], driver=driver).logits, expected)
    branch.close()


@pytest.mark.parametrize("prefetch", either("off", "step", slow=("layer",)))
def test_callbacks_are_undeclared_and_all_there(params, tokens, prefetch):
    """With declared effects each call would be dispatched in Python; without, XLA might drop or merge some."""
    plan, state, _, _ = start(params, tokens, METHODS["dynakv"], HostStore(), prefetch=prefetch)
    leaves, tree = jax.tree.flatten(state)

    def token(leaves):
        state = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(decode.fused_token(plan, params, state, jnp.asarray(tokens[:, 0]), jnp.ones(2, bool)))

    traced = jax.jit(token).trace(leaves)
    assert not traced.jaxpr.effects
    asked = str(traced.jaxpr).count("kvjax_callback" if callbacks.COMPILED else "buffer_callback[")
    assert asked >= 3 * len(plan.layers)  # a read, a row, and blocks that split
    compiled = traced.lower().compile().as_text()
    target = "kvjax_callback" if callbacks.COMPILED else "xla_buffer_python_cpu_callback"
    assert compiled.count(f'custom_call_target="{target}"') == asked


def test_reading_a_prompt_takes_memory_in_proportion_to_it(params):
    """Temporaries of a layer over 2,048 and 8,192 tokens; what grew with the square would be 16 times as much."""
    def used(length):
        x = jax.ShapeDtypeStruct((1, length, CONFIG.hidden_size), jnp.float32)
        layer, size = CONFIG.layers[0], dense_prefill.CHUNK
        program = dense_prefill.read_layer.lower(layer, size, params["layers_0"], x).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert used(8192) < 5 * used(2048)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("driver", ["staged", "fused"])
def test_the_pool_is_updated_in_place(params, tokens, driver, dtype):
    """Temporaries of a compiled step stay far below the pool; donation alone would not show a copy."""
    method = dataclasses.replace(METHODS["quest"], budget=24)
    plan = make_plan(CONFIG, method, 1, 60_000, dtype)
    state, _ = prefill.prefill(plan, params, tokens[:1, :20], jnp.asarray([20]))
    pool = sum(leaf.nbytes for leaf in jax.tree.leaves(state.layers[0].pool))
    active = jnp.ones(1, bool)
    if driver == "fused":
        used = [decode.temporary_bytes(plan, params, state)]
    else:
        layer_plan = plan.layers[0]
        read = functools.partial(decode.read_layer, CONFIG, layer_plan, params["layers_0"])
        rest = (None, Token(jnp.zeros((1, 32)), state.length, active, jnp.int32(0), state.ref), None)
        fresh = read(state.layers[0], *rest).pending.new_token
        put = (fresh, state.length, active, jnp.int32(0), state.ref)
        used = [
            temporaries(lambda one: read(one, *rest), state.layers[0]),
            temporaries(lambda one: write_token(layer_plan, one, *put)[0], state.layers[0]),
        ]
    assert max(used) < pool / 4


@compiled
def test_the_tail_is_updated_in_place():
    """Though the key that leaves is read of it: without an order said, keys and values are copied first."""
    method = dataclasses.replace(METHODS["dynakv"], window=2000, budget=2100)
    spec = method.spec(kv_heads=2, group=2, head_dim=32, capacity=4000)
    tail = caching.empty_layer(spec, method.init(spec, None), jnp.float32).tail

    def push(tail, key, at):
        return caching.push(spec, tail, key, key, at, jnp.bool_(True), jnp.int32(1))

    key, at = jnp.full((2, 32), 3.0), jnp.int32(2500)
    assert temporaries(lambda tail: push(tail, key, at), tail) < tail.key.nbytes / 4
    tail, evicted, value = push(tail, key, at)
    row = spec.sinks + (2500 - spec.sinks) % spec.ring
    np.testing.assert_array_equal(tail.key[:, row], 3)
    np.testing.assert_array_equal(evicted.key, 0)  # what was there before
    assert int(tail.pos[0, row]) == 2500 and not value.any()


@pytest.mark.parametrize("pipelined", [True, False])
def test_the_next_layer_is_read_while_one_is_indexed(params, tokens, tmp_path, monkeypatch, pipelined):
    """Or after it, and never more than one ahead; the cache is the same."""
    plan, events, fill = make_plan(CONFIG, METHODS["quest"], 2, CAPACITY), [], prefill.fill

    def read():
        for i, one in enumerate(dense_prefill.read(CONFIG, params, dense_prefill.pad(jnp.asarray(tokens[:, :40])))):
            events.append(("read", i))
            yield one

    def slow(plan, i, *rest):
        deadline = time.monotonic() + 20
        while pipelined and i == 0 and ("read", 1) not in events and time.monotonic() < deadline:
            time.sleep(0.001)
        events.append(("index", i))
        return fill(plan, i, *rest)

    monkeypatch.setattr(prefill, "fill", slow)
    length = jnp.asarray([40, 23])
    state, logits = prefill.prefill(plan, params, tokens[:, :40], length, layers=read(), pipelined=pipelined)
    order = [("read", 0), ("read", 1), ("index", 0), ("index", 1)]
    assert events == (order if pipelined else [("read", 0), ("index", 0), ("read", 1), ("index", 1)])
    monkeypatch.undo()
    expected = prefill.prefill(plan, params, tokens[:, :40], length)
    for one, other in zip(*map(jax.tree.leaves, ((state, logits), expected)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_fails_behind_a_layer_is_raised(params, tokens, monkeypatch):
    def broken(*args):
        raise WriteFailed("no such luck")

    monkeypatch.setattr(prefill, "fill", broken)
    with pytest.raises(WriteFailed, match="no such luck"):
        start(params, tokens, METHODS["quest"])


def test_nothing_recompiles_while_clusters_split(params, tokens):
    plan, state, _, _ = start(params, tokens, METHODS["dynakv"])
    read, write, *_ = decode.compiled_parts(True)
    sizes = []
    for i in range(50):
        state = decode.step(plan, params, state, tokens[:, i], donate=True).state
        sizes.append((read._cache_size(), write._cache_size()))
    assert len(set(sizes[1:])) == 1
    assert _splits(state) > 0


def test_one_program_serves_hundreds_of_tokens_while_clusters_split_on_flash(params, tmp_path, caplog):
    """The first token compiles it, and none after that compiles anything."""
    steps = 300
    text = np.random.default_rng(1).integers(0, 64, (2, max(PROMPT) + steps)).astype(np.int32)
    plan = make_plan(CONFIG, METHODS["dynakv"], 2, text.shape[1])
    branch = FlashStore(directory=tmp_path, staging_bytes=1 << 21).create(store_geometry(plan), "test")
    state, _ = prefill.prefill(plan, params, text[:, : max(PROMPT)], jnp.asarray(PROMPT), branch, Slots())
    program = decode.compiled_token(True)
    with jax.log_compiles():
        state, _ = decoded(plan, params, state, text, 1, "fused")
        assert "Compiling" in caplog.text
        caplog.clear()
        programs, before = program._cache_size(), _splits(state)
        state, _ = decoded(plan, params, state, text[:, 1:], steps - 1, "fused")
        assert "Compiling" not in caplog.text and program._cache_size() == programs
    assert _splits(state) - before > steps
    assert branch.stats().blocks_read > steps and branch.stats().blocks_written > steps
    branch.close()


def _splits(state):
    return sum(np.asarray(one.state.index.splits).sum() for one in state.layers)


def test_impossible_sizes_are_refused(params, tokens):
    with pytest.raises(ConfigError, match="budget=6"):
        make_plan(CONFIG, dataclasses.replace(METHODS["quest"], budget=6), 1, CAPACITY)
    with pytest.raises(ConfigError, match="cannot hold"):
        make_plan(CONFIG, dataclasses.replace(METHODS["dynakv"], num_blocks=4), 1, CAPACITY)
    plan = make_plan(CONFIG, METHODS["full"], 2, 30)
    with pytest.raises(PromptError, match="capacity=30"):
        prefill.prefill(plan, params, tokens[:, :40], jnp.asarray([40, 3]))
    with pytest.raises(PromptError, match="empty"):
        prefill.prefill(plan, params, tokens[:, :20], jnp.asarray([20, 0]))
