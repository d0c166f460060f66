"""Checkpoints exchanged with transformers itself, made anew for every run; needs the extra `oracles`."""

import dataclasses
import json

import numpy as np
import pytest
from tiny import dense, through_the_cache

import kvjax
from kvjax.models.checkpoint import load, save_params
from kvjax.models.config import FAMILIES, Experts, ModelConfig
from kvjax.models.hf_config import read_config
from kvjax.models.tokenizer import TextTokenizer
from kvjax.models.transformer import SparseMLP

pytestmark = pytest.mark.oracles

# Beyond the goldens' cases: other numbers of KV heads, biases and windows.
EXTRA = {
    "llama_one_head_each": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "head_dim": 16}),
    "mistral_full": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3_biased_windows": (
        "qwen3",
        {"attention_bias": True, "head_dim": 24, "use_sliding_window": True, "sliding_window": 5,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3_tied_window": ("phi3", {"tie_word_embeddings": True, "sliding_window": 5, "pad_token_id": None}),
    "gemma2_one_window": ("gemma2", {"num_hidden_layers": 3, "sliding_window": 5, "attn_logit_softcapping": None,
                                    "attention_bias": True, "head_dim": 8}),
    "gemma3_tied": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 6, "head_dim": 24,
                                    "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "mixtral_tied": ("mixtral", {"tie_word_embeddings": True, "num_local_experts": 3, "num_experts_per_tok": 3}),
    "qwen2_moe_windows": (
        "qwen2_moe",
        {"num_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
         "shared_expert_intermediate_size": 8, "decoder_sparse_step": 2, "qkv_bias": False, "use_sliding_window": True,
         "sliding_window": 5},
    ),
    "qwen3_moe_biased_window": (
        "qwen3_moe",
        {"attention_bias": True, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
         "use_sliding_window": True, "sliding_window": 5},
    ),
    "llama_longrope": ("llama", {"rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 6.0, 8.0],
        "factor": 4.0, "original_max_position_embeddings": 20, "rope_theta": 1e4}}),
}
GOLDEN_CASES = (
    "llama_llama3_rope", "llama_linear_biases_tied", "mistral_window", "qwen2_sharded", "qwen3_bf16", "llama_yarn",
    "qwen2_yarn_mscale", "llama_dynamic", "phi3_longrope", "phi3_partial", "gemma2_soft_caps", "gemma3_two_ropes",
    "gpt_oss", "mixtral", "qwen2_moe_sharded", "qwen3_moe_stacked",
)
LENGTH = 80


@pytest.fixture(params=[*GOLDEN_CASES, *EXTRA])
def case(request):
    """A case of make_goldens with a seed of its own, so that the goldens' numbers are not met again."""
    from transformers import AutoConfig

    from scripts import make_goldens

    if request.param in EXTRA:
        family, changes = EXTRA[request.param]
        return make_goldens.Case(AutoConfig.for_model(family, **make_goldens.SHAPE | changes), seed=11)
    return dataclasses.replace(make_goldens.cases()[request.param], seed=14 if "gemma2" in request.param else 12)


@pytest.fixture
def stored(case, tmp_path):
    """The directory to which transformers saved the case's model."""
    from scripts import make_goldens

    make_goldens.save(case, tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.fixture
def tokens(case):
    from scripts import make_goldens

    return make_goldens.random_tokens(case, batch=2, length=LENGTH)


def their_logits(directory, tokens):
    from scripts import make_goldens

    return make_goldens.logits(make_goldens.load(directory), tokens)


def our_logits(directory, tokens):
    config, params = load(directory, read_config(directory))
    return dense(params, tokens, config)


def test_our_logits_of_their_checkpoint(stored, tokens):
    np.testing.assert_allclose(our_logits(stored, tokens), their_logits(stored, tokens), rtol=0, atol=1e-4)


def our_llm(directory):
    """Without a tokenizer, and without end."""
    config, params = load(directory, read_config(directory))
    return kvjax.LLM(dataclasses.replace(config, eos_token_ids=()), params)


def their_decoded_logits(directory, tokens, start):
    """Logits [B, T - start, V] of a prompt of `start` tokens and of all but the last of the others, one at a time."""
    import torch

    from scripts import make_goldens

    model, rows, logits = make_goldens.load(directory), torch.from_numpy(tokens).long(), []
    with torch.no_grad():
        step = model(rows[:, :start], use_cache=True)
        for at in range(start, tokens.shape[1]):
            logits.append(step.logits[:, -1].numpy())
            step = model(rows[:, at : at + 1], past_key_values=step.past_key_values, use_cache=True)
    return np.stack(logits, 1)


def test_our_decoded_logits_are_theirs(stored, tokens):
    """Each through its own cache: half of each row is read at once, and the rest token by token."""
    half = LENGTH // 2
    ours, theirs = through_the_cache(our_llm(stored), tokens, half), their_decoded_logits(stored, tokens, half)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_our_greedy_answer_is_theirs(stored, tokens):
    from scripts import make_goldens

    llm, start = our_llm(stored), tokens[0]
    if llm.config.rope.by_length:
        start = start[: make_goldens.LENGTH]  # with the answer, on one side of the model's original length
    prompt = start.tolist()
    theirs = make_goldens.greedy(make_goldens.load(stored), start, make_goldens.STEPS).tolist()
    ours = llm.generate(prompt[-1:], llm.prefill(prompt[:-1]), max_new_tokens=make_goldens.STEPS)
    assert ours.tokens == [theirs]


def test_their_logits_of_our_checkpoint(stored, tokens, tmp_path):
    config, params = load(stored, read_config(stored))
    save_params(params, config, tmp_path / "ours")
    np.testing.assert_array_equal(their_logits(tmp_path / "ours", tokens), their_logits(stored, tokens))


def test_their_logits_of_our_bfloat16_checkpoint(stored, tokens, tmp_path):
    config, params = load(stored, read_config(stored))
    save_params(params, config, tmp_path / "ours", "bfloat16")
    np.testing.assert_allclose(
        our_logits(tmp_path / "ours", tokens), their_logits(tmp_path / "ours", tokens), rtol=0, atol=1e-4
    )


def test_gpt_oss_experts_are_theirs():
    """The feed-forward network alone: their maps are transposed, and those of gate and up alternate."""
    import torch
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(hidden_size=12, intermediate_size=10, num_local_experts=7, num_experts_per_tok=3)
    config._experts_implementation = "eager"
    theirs, rng = GptOssMLP(config), np.random.default_rng(0)
    p = {name: 2 * rng.normal(size=tuple(value.shape)).astype(np.float32) for name, value in theirs.named_parameters()}
    theirs.load_state_dict({name: torch.from_numpy(value) for name, value in p.items()})
    x = rng.normal(size=(2, 9, 12)).astype(np.float32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(x))[0].numpy()
    wide, bias, down = (p[f"experts.{name}"] for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj"))
    params = {
        "router": {"weight": p["router.weight"], "bias": p["router.bias"]},
        "gate_proj": wide[..., ::2].swapaxes(1, 2), "gate_proj_bias": bias[:, ::2],
        "up_proj": wide[..., 1::2].swapaxes(1, 2), "up_proj_bias": bias[:, 1::2],
        "down_proj": down.swapaxes(1, 2), "down_proj_bias": p["experts.down_proj_bias"],
    }
    ours = SparseMLP(ModelConfig(
        family="mixtral", vocab_size=20, hidden_size=12, intermediate_size=10, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=4, experts=Experts(7, 3, 10, bias=True, limit=7.0)))
    np.testing.assert_allclose(ours.apply({"params": params}, x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_default_is_theirs(family, tmp_path):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    ours, theirs = read_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    windows = [getattr(theirs, "sliding_window", None)] * ours.num_layers
    for i, kind in enumerate(getattr(theirs, "layer_types", None) or ()):
        windows[i] = windows[i] if kind == "sliding_attention" else None
    assert ours.windows == tuple(windows)
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size, ours.num_layers) == (
        theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size, theirs.num_hidden_layers
    )
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.num_heads, ours.num_kv_heads, ours.head_dim) == (
        theirs.num_attention_heads, theirs.num_key_value_heads, head_dim
    )
    assert (ours.max_position, ours.rms_norm_eps, ours.tie_embeddings) == (
        theirs.max_position_embeddings, theirs.rms_norm_eps, theirs.tie_word_embeddings
    )
    of_kind = theirs.rope_parameters
    full, local = (of_kind.get(kind, of_kind) for kind in ("full_attention", "sliding_attention"))
    for rope, their_rope in ((ours.rope, full), (ours.local_rope or ours.rope, local)):
        assert (rope.kind, rope.theta) == (their_rope["rope_type"], their_rope["rope_theta"])
    if ours.experts is not None:
        mixture = ours.experts
        assert (mixture.count, mixture.per_token, mixture.size, mixture.normalise, mixture.shared_size) == (
            theirs.num_experts, theirs.num_experts_per_tok,
            getattr(theirs, "moe_intermediate_size", theirs.intermediate_size),
            getattr(theirs, "norm_topk_prob", True), getattr(theirs, "shared_expert_intermediate_size", None),
        )
    eos = () if theirs.eos_token_id is None else (theirs.eos_token_id,)
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, eos)


CHAT = """\
{{- bos_token }}
{%- if tools is not none %}tools{% endif %}
{% for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
{{ message | tojson }}{% generation %}{{ message.content }}{% endgeneration %}

{% endfor %}
{%- if add_generation_prompt %}<assistant>{{ eos_token }}{% endif %}"""


@pytest.mark.parametrize("prompt", [True, False])
def test_chat_template_renders_as_theirs(tmp_path, prompt):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    theirs.chat_template = CHAT
    theirs.save_pretrained(tmp_path)
    messages = [{"role": role, "content": "<é>\n  &"} for role in ("user", "skip", "assistant")]
    ours = TextTokenizer.from_directory(tmp_path)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert ours.apply_chat_template(messages, prompt) == expected
    assert (ours.bos_id, ours.eos_ids) == (0, (1,))
