"""What a model computes on the devices of a mesh, against one device: run by `test_mesh.py` in a process with eight."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS as SMALL
from jax.sharding import NamedSharding, PartitionSpec
from test_architecture import ROOT
from tiny import make_params

import kvjax
from kvjax.errors import ConfigError, MethodError
from kvjax.inference import decode, prefill
from kvjax.inference.plan import make_plan, specs_of_layers
from kvjax.methods import METHODS, Quest
from kvjax.models import checkpoint, hf_config
from kvjax.models.config import ModelConfig
from kvjax.models.mesh import MeshLayout, MeshRules
from kvjax.models.transformer import Transformer
from tests.models.test_gguf import CONFIGS, written

GOLDENS = ROOT / "tests" / "goldens"
CONFIG = ModelConfig(
    family="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=16, num_kv_heads=8,
    head_dim=8, max_position=128, qkv_bias=True, output_bias=True, mlp_bias=True,
)
CAPACITY, PROMPT, STEPS = 64, 36, 8
# One instance of every method, with scores shared by all heads where the method can.
CHANGED = {
    "chunkkv": {"shared": True}, "infinigen": {"shared": True}, "icecache": {"dense_layers": 0},
    "omnikv": {"dense_layers": 0, "reuse": 2}, "rle": {"slots": CAPACITY}, "shadowkv": {"sigma": 4.0},
}
INSTANCES = {name: dataclasses.replace(SMALL[name], **CHANGED.get(name, {})) for name in METHODS}
MORE = {
    "kvswap_mean": dataclasses.replace(SMALL["kvswap"], aggregation="mean"),
}
TWO_LAYERS = ("kvswap", "omnikv")  # which select for the next layer
# Methods of which no head knows of another's, nor its own number, and some that share code with others here.
LESS_TO_TEST = ("rle", "oracle", "streaming_llm", "snapkv", "sentencekv", "loki", "arkvale", "clusterkv", "h2o",
                "infllm", "omnikv", "chunkkv", "magicpig")
TOKENS = np.random.default_rng(0).integers(0, 64, (8, CAPACITY)).astype(np.int32)


def layout_of(*shape):
    """A mesh of this shape, without an axis that has one device."""
    names = [name for name, size in zip(("data", "model"), shape, strict=True) if size > 1]
    return MeshLayout.on(jax.make_mesh([size for size in shape if size > 1], names), MeshRules())


@functools.cache
def config_of(name):
    return dataclasses.replace(CONFIG, num_layers=2 if name in TWO_LAYERS else 1, windows=())


@functools.cache
def params_of(config):
    """Random parameters, with biases that are not zero."""
    return jax.tree.map(lambda leaf: leaf + 0.1 if leaf.ndim == 1 else leaf, make_params(config, sharper=2))


def run(name, layout, batch, driver="fused"):
    """Logits of a prompt, and of the tokens after it; and the state before and after these."""
    config = config_of(name)
    params = params_of(config) if layout is None else layout.place(config, params_of(config))
    plan = make_plan(config, (INSTANCES | MORE)[name], batch, CAPACITY, layout=layout)
    length = PROMPT - np.arange(batch, dtype=np.int32)
    state, logits = prefill.prefill(plan, params, TOKENS[:batch, :PROMPT], length)
    outputs, filled = [logits], jax.tree.map(lambda leaf: leaf.sharding, state)
    for i in range(STEPS):
        done = decode.step(plan, params, state, TOKENS[:batch, PROMPT + i], driver=driver, donate=True)
        outputs.append(done.logits)
        state = done.state
    return plan, np.stack(outputs), filled, state


@functools.cache
def alone(name, batch):
    return run(name, None, batch)[1]


def assert_same(found, expected):
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def assert_in_place(plan, state, filled=None):
    """Every array of the cache is where the plan says, as it was when it was filled; empty ones are nowhere."""
    expected = jax.tree.map(lambda spec: NamedSharding(plan.layout.mesh, spec), specs_of_layers(plan),
                            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    leaves, places = jax.tree.leaves(state.layers), jax.tree.leaves(expected)
    assert len(leaves) == len(places)
    for leaf, place in zip(leaves, places, strict=True):
        assert not leaf.size or leaf.sharding.is_equivalent_to(place, leaf.ndim)
    if filled is not None:
        for leaf, before in zip(jax.tree.leaves(state), jax.tree.leaves(filled), strict=True):
            assert not leaf.size or leaf.sharding.is_equivalent_to(before, leaf.ndim)


def test_there_are_eight_devices():
    assert len(jax.devices()) == 8


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LESS_TO_TEST))
                                  for name in (*INSTANCES, *MORE)])
def test_a_method_decodes_on_two_by_four_devices_as_on_one(name):
    plan, logits, filled, state = run(name, layout_of(2, 4), 2)
    assert_same(logits, alone(name, 2))
    assert_in_place(plan, state, filled)


@pytest.mark.parametrize(("name", "shape"), [("kvswap", (1, 8)), ("quest", (8, 1))])
def test_heads_alone_and_sequences_alone_can_be_divided(name, shape):
    batch = shape[0]
    plan, logits, filled, state = run(name, layout_of(*shape), batch)
    assert_same(logits, alone(name, batch))
    assert_in_place(plan, state, filled)


def test_the_staged_driver_decodes_what_one_device_does():
    plan, logits, filled, state = run("kvswap", layout_of(2, 4), 2, "staged")
    assert_same(logits, alone("kvswap", 2))
    assert_in_place(plan, state, filled)


@pytest.fixture(scope="module")
def both():
    """The same model on one device, and on a mesh whose axes have other names."""
    mesh = jax.make_mesh((4, 2), ("tensor", "replica"))
    rules = kvjax.MeshRules(sequences="replica", heads="tensor")
    config = config_of("kvswap")
    return kvjax.LLM(config, params_of(config)), kvjax.LLM(config, params_of(config), mesh=mesh, rules=rules)


def test_a_conversation_goes_as_on_one_device(both):
    """Prefill in chunks, more text, answers by all drivers, and scores."""
    # Fewer directions than tokens in the first chunk: rounding would decide about others, and the devices' is another.
    method, found = dataclasses.replace(INSTANCES["kvswap"], sigma=8), []
    for llm in both:
        cache = llm.prefill(TOKENS[:2, :24].tolist(), method=method, capacity=CAPACITY, chunk=16)
        more = llm.extend(cache, TOKENS[:2, 24:33].tolist(), chunk=4)
        answers = [llm.generate([[1, 2], [3]], more, max_new_tokens=5, driver=driver)
                   for driver in ("staged", "fused", "loop")]
        scores = llm.score(TOKENS[:2, 40:44].tolist(), more)
        found.append((np.stack([more.logits, answers[0].cache.logits]), [answer.tokens for answer in answers],
                      np.array(scores.logprobs)))
        if llm.layout is not None:
            for one in (cache, more, more.fork(), *(answer.cache for answer in answers), scores.cache):
                assert_in_place(one.plan, one.state)
    alone, divided = found
    assert divided[1] == alone[1] and divided[1][0] == divided[1][1] == divided[1][2]
    assert_same(divided[0], alone[0])
    np.testing.assert_allclose(divided[2], alone[2], atol=1e-4)


def test_a_method_that_fits_itself_to_prompts_reads_them_on_the_mesh(both):
    method = dataclasses.replace(INSTANCES["rle"], slots=None)
    logits = [llm.prefill(TOKENS[:2, :24].tolist(), method=method, capacity=CAPACITY).logits for llm in both]
    assert_same(np.asarray(logits[1]), np.asarray(logits[0]))


def test_a_saved_cache_and_a_saved_model_are_those_of_one_device(both, tmp_path):
    one, divided = both
    assert divided.fingerprint == one.fingerprint and divided.identity == one.identity
    cache = divided.prefill(TOKENS[:2, :24].tolist(), method=INSTANCES["quest"], capacity=CAPACITY)
    cache.save(tmp_path / "cache")
    restored = one.restore(tmp_path / "cache")
    assert_same(np.asarray(one.generate([[1], [2]], restored, max_new_tokens=2).cache.logits),
                np.asarray(divided.generate([[1], [2]], cache, max_new_tokens=2).cache.logits))
    kvjax.save(divided, tmp_path / "model")
    weights = checkpoint.load(tmp_path / "model", hf_config.read_config(tmp_path / "model"))[1]
    jax.tree.map(np.testing.assert_array_equal, weights, one.params)


# ------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("name", [
    "gemma2_soft_caps", "gpt_oss", "llama_linear_biases_tied", "mixtral", "phi3_partial", "qwen2_moe_sharded",
    "qwen3_moe_stacked",
])
def test_a_model_in_files_is_divided_while_it_is_read(name):
    """Parameters have the same numbers, each device has its part, and a forward pass has the same logits."""
    config = hf_config.read_config(GOLDENS / name)
    stored, layout = checkpoint.find(GOLDENS / name, config), layout_of(4, 2)
    layout.check(stored.config)
    config = stored.config.for_length(12)
    whole, divided = stored.read(), stored.read(layout=layout)
    jax.tree.map(np.testing.assert_array_equal, divided, whole)
    for leaf, spec in zip(jax.tree.leaves(divided), jax.tree.leaves(
            layout.params(config, whole), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)), strict=True):
        assert leaf.sharding.is_equivalent_to(NamedSharding(layout.mesh, spec), leaf.ndim)
    layer = divided["layers_0"]
    assert layer["q_proj"]["weight"].addressable_shards[0].data.shape[0] * 2 == config.num_heads * config.head_dim
    assert layer["o_proj"]["weight"].addressable_shards[0].data.shape[1] * 2 == config.num_heads * config.head_dim
    tokens = jnp.asarray(TOKENS[:4, :12] % config.vocab_size)

    def forward(config, params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)
        return Transformer(config).apply({"params": params}, tokens, positions)

    takes = layout.params(config, whole), layout.by_sequence
    own = layout.run(functools.partial(forward, layout.of_one(config)), takes, layout.by_sequence)
    assert_same(np.asarray(jax.jit(own)(divided, tokens)),
                np.asarray(jax.jit(functools.partial(forward, config))(whole, tokens)))


@pytest.mark.parametrize("name", ["llama_biased", "gemma3", "phi3"])
def test_a_gguf_file_is_divided_while_it_is_read(name, tmp_path):
    """Also where its rows are in another order, have a number added, or are columns of a matrix."""
    mesh, file = jax.make_mesh((4, 2), ("data", "model")), written(tmp_path / "model.gguf", CONFIGS[name])
    whole, divided = kvjax.load(file), kvjax.load(file, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, divided.params, whole.params)
    assert not divided.params["layers_0"]["q_proj"]["weight"].sharding.is_fully_replicated


def test_a_layer_sums_over_devices_twice():
    """Once after the output projection, once after the feed-forward network; beside that, embedding and logits."""
    layout, config = layout_of(2, 4), CONFIG
    params = layout.place(config, params_of(config))
    plan = make_plan(config, INSTANCES["full"], 2, CAPACITY, layout=layout)
    state, _ = prefill.prefill(plan, params, TOKENS[:2, :PROMPT], np.array([PROMPT, PROMPT], np.int32))
    text = str(jax.make_jaxpr(functools.partial(decode.fused_token, plan))(
        params, state, jnp.zeros(2, jnp.int32), jnp.ones(2, bool)))
    assert text.count("psum") == 2 + 1 and text.count("all_gather[") == 1


def test_a_vocabulary_that_does_not_divide_is_on_every_device():
    config = dataclasses.replace(CONFIG, vocab_size=63)
    layout = layout_of(2, 4)
    assert layout.of_one(config).vocab_size == 63 and layout.of_one(CONFIG).vocab_size == 16
    params = layout.place(config, params_of(config))
    assert params["embedding"]["embedding"].sharding.is_fully_replicated
    tokens, logits = TOKENS[:2, :8] % 63, []
    for where, given in ((None, params_of(config)), (layout, params)):
        plan = make_plan(config, INSTANCES["full"], 2, CAPACITY, layout=where)
        logits.append(np.asarray(prefill.prefill(plan, given, tokens, np.array([8, 8], np.int32))[1]))
    assert_same(logits[1], logits[0])


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(("changes", "says"), [
    ({"num_heads": 12, "num_kv_heads": 6}, "6 KV heads cannot be divided evenly among the 4 devices"),
    ({"num_heads": 4, "num_kv_heads": 2}, "2 KV heads cannot be divided"),
    ({"intermediate_size": 50}, "50 intermediate numbers of the feed-forward network"),
])
def test_sizes_that_do_not_divide_are_refused(changes, says):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ConfigError, match=says):
        kvjax.LLM(config, {}, mesh=jax.make_mesh((2, 4), ("data", "model")))


def test_what_a_mesh_cannot_do_is_refused(both, tmp_path):
    one, divided = both
    quest = INSTANCES["quest"]
    rows = TOKENS[:2, :24].tolist()
    with pytest.raises(ConfigError, match="3 sequences cannot be divided evenly among the 2 devices"):
        divided.prefill(TOKENS[:3, :24].tolist(), method=quest)
    with pytest.raises(ConfigError, match="3 sequences"):
        divided.read(TOKENS[:3, :24].tolist())
    for settings in ({"store": kvjax.HostStore()}, {"slots": kvjax.Slots(offload=kvjax.HostStore())}):
        with pytest.raises(ConfigError, match="caches on a mesh are in memory"):
            divided.prefill(rows, method=quest, **settings)
    with pytest.raises(ConfigError, match="restored on one device"):
        divided.restore(tmp_path)
    with pytest.raises(ConfigError, match="on different devices"):
        divided.generate([[1], [2]], one.prefill(rows, method=quest, capacity=CAPACITY))
    with pytest.raises(ConfigError, match="tuning measures caches over a store"):
        kvjax.tune(divided, kvjax.HostStore(), "text", max_bytes=1 << 20)
    with pytest.raises(ConfigError, match="leave it out with mesh="):
        kvjax.load(ROOT / "kvjax" / "reference", weights="int8", mesh=divided.layout.mesh, rules=divided.layout.rules)


@pytest.mark.parametrize(("shape", "names", "rules", "says"), [
    ((8,), ("x",), MeshRules(), "name two axes with rules="),
    ((2, 4), ("data", "model"), MeshRules("model", "model"), "name two axes"),
    ((2, 2, 2), ("data", "model", "expert"), MeshRules(), "'data', 'model', 'expert'"),
])
def test_a_mesh_with_other_axes_is_refused(shape, names, rules, says):
    with pytest.raises(ConfigError, match=says):
        kvjax.LLM(CONFIG, params_of(CONFIG), mesh=jax.make_mesh(shape, names), rules=rules)


def test_what_is_no_mesh_is_refused(unchecked):
    with pytest.raises(ConfigError, match=r"must be a jax\.sharding\.Mesh"):
        kvjax.LLM(CONFIG, params_of(CONFIG), mesh=jax.devices())


@dataclasses.dataclass(frozen=True)
class Undivided(Quest):
    """A method with an array whose size is not one of its heads."""

    def init(self, spec, weights):
        return super().init(spec, weights), jnp.zeros(spec.kv_heads + 1)


def test_an_index_that_does_not_divide_by_heads_is_refused():
    plan = make_plan(CONFIG, Undivided(budget=24, sinks=2, window=4, page=4), 2, CAPACITY, layout=layout_of(2, 4))
    with pytest.raises(MethodError, match="an axis of 9 is one of 3 on each of 4 devices"):
        specs_of_layers(plan)
