"""Generator of the tiny random checkpoints of tests/goldens, with transformers' outputs on them (seconds).

    python -m scripts.make_goldens DIRECTORY

Needs the extra `oracles`. Every checkpoint is saved by transformers, read back, and run in f32:

    golden.npz: tokens [B, T] int32, logits [B, T, V] f32, greedy [64] int32 (the continuation of row 0); for models
    whose rotary embedding depends on the length: long_tokens [N] int32, and long_logits [T, V] f32 of the last ones
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

BATCH, LENGTH, STEPS = 2, 24, 64
ORIGINAL, BEYOND = 96, 120  # a length that no golden but one text of each model by length exceeds, and that text's
SHAPE = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.2, 2.0, 3.5, 5.0]}
GEMMA = SHAPE | {  # untied, as scaled embeddings of random numbers make every token follow itself
    "num_hidden_layers": 3, "head_dim": 12, "bos_token_id": 2, "eos_token_id": 1, "query_pre_attn_scalar": 9,
    "tie_word_embeddings": False,
}
PHI3 = SHAPE | {"original_max_position_embeddings": ORIGINAL, "pad_token_id": None}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and the form of its checkpoint."""

    config: PreTrainedConfig
    seed: int
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "1GB"
    rope_in_old_spelling: bool = False
    stacked_experts: bool = False  # in files as they are in memory, not as earlier versions of transformers wrote them
    beyond: int | None = None  # tokens of a text that is longer than the model's original length


def cases() -> dict[str, Case]:
    """Returns one case for each switch of the families, all with fewer KV heads than query heads."""
    return {
        "llama_llama3_rope": Case(LlamaConfig(**SHAPE | {"eos_token_id": [2, 3]}, rope_parameters=LLAMA3), seed=0),
        "llama_linear_biases_tied": Case(
            LlamaConfig(
                **SHAPE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
            ),
            seed=1, rope_in_old_spelling=True,
        ),
        "mistral_window": Case(MistralConfig(**SHAPE, sliding_window=8, rms_norm_eps=0.01), seed=2),
        "qwen2_sharded": Case(
            Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=10, max_window_layers=1),
            seed=3, max_shard_size="40KB",
        ),
        "qwen3_bf16": Case(
            Qwen3Config(
                **SHAPE | {"hidden_size": 48}, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
            ),
            seed=4, dtype=torch.bfloat16,
        ),
        "llama_yarn": Case(
            LlamaConfig(**SHAPE, rope_parameters={
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 64,
                "beta_fast": 6.0, "beta_slow": 0.5, "truncate": False,
            }),
            seed=5, rope_in_old_spelling=True,
        ),
        "qwen2_yarn_mscale": Case(
            Qwen2Config(**SHAPE, rope_parameters={
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 64,
                "mscale": 1.4, "mscale_all_dim": 0.6,
            }),
            seed=6,
        ),
        "llama_dynamic": Case(
            LlamaConfig(
                **SHAPE | {"max_position_embeddings": ORIGINAL},
                rope_parameters={"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10_000.0},
            ),
            seed=7, beyond=BEYOND,
        ),
        "phi3_longrope": Case(
            Phi3Config(**PHI3, sliding_window=100, rope_parameters=LONGROPE | {"rope_theta": 10_000.0}),
            seed=8, rope_in_old_spelling=True, beyond=BEYOND,
        ),
        "phi3_partial": Case(
            Phi3Config(
                **PHI3, partial_rotary_factor=0.75,
                rope_parameters={name: value if name == "rope_type" else value[:3] for name, value in LONGROPE.items()},
            ),
            seed=9, beyond=BEYOND,
        ),
        "gemma2_soft_caps": Case(
            Gemma2Config(**GEMMA, sliding_window=7, attn_logit_softcapping=1.5, final_logit_softcapping=4.0), seed=13,
        ),
        "gemma3_two_ropes": Case(
            Gemma3TextConfig(
                **GEMMA | {"num_hidden_layers": 4, "num_key_value_heads": 1}, sliding_window=9,
                layer_types=["sliding_attention", "full_attention"] * 2,
                rope_parameters={
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                },
            ),
            seed=11,
        ),
        "gpt_oss": Case(
            GptOssConfig(
                **SHAPE | {"num_hidden_layers": 3, "head_dim": 12, "intermediate_size": 20}, num_local_experts=5,
                num_experts_per_tok=2, sliding_window=7, rope_parameters={
                    "rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 64,
                    "beta_fast": 6.0, "beta_slow": 0.5, "truncate": False,
                },
            ),
            seed=13,
        ),
        "mixtral": Case(
            MixtralConfig(
                **SHAPE | {"intermediate_size": 20}, num_local_experts=5, num_experts_per_tok=2, sliding_window=9,
            ),
            seed=10,
        ),
        "qwen2_moe_sharded": Case(
            Qwen2MoeConfig(
                **SHAPE, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=12, mlp_only_layers=[0],
                shared_expert_intermediate_size=20,
            ),
            seed=11, max_shard_size="40KB",
        ),
        "qwen3_moe_stacked": Case(
            Qwen3MoeConfig(
                **SHAPE, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=10, norm_topk_prob=True,
                head_dim=12,
            ),
            seed=12, dtype=torch.bfloat16, stacked_experts=True,
        ),
    }


def build(case: Case) -> PreTrainedModel:
    """Returns a model whose every parameter matters: random norm scales and biases, logits of order one."""
    generator = torch.Generator().manual_seed(case.seed)
    model = AutoModelForCausalLM.from_config(case.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_((0 if "gemma" in case.config.model_type else 1) + 0.3 * noise)
            elif name.endswith(("bias", "sinks")):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    return model


def save(case: Case, directory: pathlib.Path) -> None:
    """Writes the checkpoint with transformers, then changes its config to the older spelling if asked."""
    build(case).to(case.dtype).save_pretrained(
        directory, max_shard_size=case.max_shard_size, save_original_format=not case.stacked_experts
    )
    if case.rope_in_old_spelling:
        path = directory / "config.json"
        fields = json.loads(path.read_text())
        rope = fields.pop("rope_parameters")
        fields |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
        path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def load(directory: pathlib.Path) -> PreTrainedModel:
    """Returns the stored model in evaluation mode and f32, with eager attention; eager experts take any size."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def random_tokens(case: Case, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(case.seed).integers(0, case.config.vocab_size, (batch, length), dtype=np.int32)


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits [B, T, V] of tokens [B, T], from one pass without a cache."""
    return model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()


def greedy(model: PreTrainedModel, tokens: np.ndarray, steps: int) -> np.ndarray:
    """Returns the `steps` likeliest next tokens after tokens [T]; raises ValueError if one is close enough to depend on
    rounding."""
    for _ in range(steps):
        last = logits(model, tokens[None])[0, -1]
        second, first = np.sort(last)[-2:]
        if first - second < 1e-3:
            raise ValueError(f"token {len(tokens)} is a draw ({first - second:.1e}); take another seed")
        tokens = np.append(tokens, np.int32(last.argmax()))
    return tokens[-steps:]


def golden(case: Case, directory: pathlib.Path) -> dict[str, Any]:
    model, tokens = load(directory), random_tokens(case, BATCH, LENGTH)
    arrays = {"tokens": tokens, "logits": logits(model, tokens), "greedy": greedy(model, tokens[0], STEPS)}
    if case.beyond is not None:  # last: transformers does not go back to the frequencies of short texts
        long_tokens = random_tokens(case, 1, case.beyond)
        arrays |= {"long_tokens": long_tokens[0], "long_logits": logits(model, long_tokens)[0, -LENGTH:]}
    return arrays


def main(root: str) -> None:
    logging.disable_progress_bar()
    for name, case in cases().items():
        directory = pathlib.Path(root) / name
        save(case, directory)
        arrays = golden(case, directory)
        np.savez_compressed(directory / "golden.npz", **arrays)
        distinct = len(set(arrays["greedy"].tolist()))
        print(f"{name}: logits of size {np.abs(arrays['logits']).mean():.2f}, {distinct} distinct tokens in greedy")


if __name__ == "__main__":
    main(sys.argv[1])
