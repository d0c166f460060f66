"""What transformers knows of each family of models: the defaults of its fields, and its name for the model.

Families with an attention that this library does not have are named with the reason.
"""

from kvjax.models.json_file import Fields

# Defaults of the configuration classes of transformers 5.2: those of all families, then those of each.
_COMMON = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "head_dim": None, "rope_theta": 10_000.0,
}
_QWEN = _COMMON | {
    "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "max_position_embeddings": 32_768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
    "bos_token_id": None, "eos_token_id": None,
}
_GEMMA = _COMMON | {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None, "use_bidirectional_attention": None,
    "bos_token_id": 2, "eos_token_id": 1,
}
_QWEN_MOE = _QWEN | {
    "hidden_size": 2048, "num_hidden_layers": 24, "norm_topk_prob": False, "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
DEFAULTS: dict[str, Fields] = {
    "llama": _COMMON | {
        "vocab_size": 32_000, "intermediate_size": 11_008, "num_key_value_heads": None, "max_position_embeddings": 2048,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "mistral": _COMMON | {
        "vocab_size": 32_000, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
        "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "phi3": _COMMON | {
        "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "num_key_value_heads": None,
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "sliding_window": None, "bos_token_id": 1, "eos_token_id": 32_000,
    },
    "gemma2": _GEMMA | {
        "vocab_size": 256_000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA | {
        "vocab_size": 262_208, "max_position_embeddings": 131_072, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "rope_theta": 1e6, "rope_local_base_freq": 10_000.0,
    },
    "mixtral": _COMMON | {
        "vocab_size": 32_000, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "bos_token_id": 1, "eos_token_id": 2,
        "num_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen2_moe": _QWEN_MOE | {
        "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "qkv_bias": True,
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": _QWEN_MOE | {
        "intermediate_size": 6144, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gpt_oss": _COMMON | {
        "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128, "layer_types": None,
        "num_local_experts": 128, "num_experts_per_tok": 4, "bos_token_id": None, "eos_token_id": None,
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                            "original_max_position_embeddings": 4096},
    },
}
GEMMAS = ("gemma2", "gemma3_text")
ALTERNATING = (*GEMMAS, "gpt_oss")  # families in which layers with a sliding window alternate with others
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "phi3": "Phi3ForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "gpt_oss": "GptOssForCausalLM",
}
_LATENT = "its attention keeps one latent vector of a token for all heads, and caches here keep keys and values of each"
_CHUNKED = "some of its layers have no positions, and others attend within chunks"
UNSUPPORTED = {
    "deepseek_v2": _LATENT, "deepseek_v3": _LATENT, "deepseek_v32": _LATENT, "llama4": _CHUNKED,
    "llama4_text": _CHUNKED, "gemma3n": "its layers share keys and values", "gemma3n_text": "its layers share keys and "
    "values", "mllama": "some of its layers attend an image",
}
NO_SWITCH = ("mistral", "mixtral", "phi3")  # families whose sliding window is in use in all layers if there is one
FULL, SLIDING = "full_attention", "sliding_attention"
