"""Configuration of a decoder-only model of the Llama family, as a hashable value."""

import dataclasses
import functools
from typing import Literal

from kvjax.errors import ConfigError
from kvjax.ops.rotary import RopeConfig
from kvjax.ops.shards import WHOLE, Shards

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe",
    "gpt_oss",
)
Activation = Literal["silu", "gelu_tanh"]
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position",
)


_SHOWN = 20  # fields that every representation has


@dataclasses.dataclass(frozen=True)
class Experts:
    """Mixture of experts that most or all layers have as their feed-forward network.

    count         experts of a layer
    per_token     experts that each token goes through
    size          intermediate size of an expert
    normalise     whether the weights of a token's experts sum to 1
    shared_size   intermediate size of the expert that every token goes through; None = there is none
    dense_layers  layers with an ordinary feed-forward network, in order
    bias          whether the router and all maps of an expert have biases
    limit         limit of GPT-OSS's SwiGLU; None = the usual one, without a limit
    """

    count: int
    per_token: int
    size: int
    normalise: bool = True
    shared_size: int | None = None
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    limit: float | None = None

    def __post_init__(self):
        for name in ("count", "per_token", "size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} of a mixture of experts must be at least 1")
        if self.shared_size is not None and self.shared_size < 1:
            raise ConfigError(f"shared_size={self.shared_size} must be at least 1, or None for no shared expert")
        if self.limit is not None and not self.limit > 0:
            raise ConfigError(f"limit={self.limit} of a mixture of experts must be above 0, or None for no limit")
        if self.per_token > self.count:
            raise ConfigError(f"{self.per_token} experts per token exceed the {self.count} experts of a layer")


@dataclasses.dataclass(frozen=True, repr=False)
class ModelConfig:
    """Shape and switches of a model.

    windows        sliding window of each layer in tokens, or None
    rope           rotary embedding
    local_rope     that of layers with a sliding window; None = as of the others
    query_scalar   number by whose inverse square root scores are scaled; None = head_dim
    soft_cap       bound of scores (`kvjax.ops.attention.soft_capped`); None = none
    logit_cap      bound of the logits, likewise
    sink_logits    whether query heads have a learned logit without key and value (`kvjax.ops.attention.normalise`)
    activation     of the feed-forward network
    norm_offset    number that is added to the scale of a normalisation
    out_norms      whether outputs of attention and feed-forward network are normalised
    scaled_embedding  whether embeddings are multiplied by the square root of hidden_size
    experts        mixture of experts that layers have as their feed-forward network; None = no layer
    shards         devices among which heads and intermediate sizes are divided (`kvjax.models.mesh`); the sizes here
                   are those on one of them
    vocabulary     devices among which the vocabulary is divided, likewise
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int = 2048
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    use_mlp: bool = True
    windows: tuple[int | None, ...] = ()
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    experts: Experts | None = None
    local_rope: RopeConfig | None = None
    query_scalar: float | None = None
    soft_cap: float | None = None
    logit_cap: float | None = None
    sink_logits: bool = False
    activation: Activation = "silu"
    norm_offset: float = 0.0
    out_norms: bool = False
    scaled_embedding: bool = False
    shards: Shards = WHOLE
    vocabulary: Shards = WHOLE

    def __repr__(self) -> str:
        # `LLM.identity`, which adapters and delimiter tables name, digests this text: fields that came later are left
        # out where they say nothing.
        shown = [field.name for i, field in enumerate(dataclasses.fields(self))
                 if i < _SHOWN or getattr(self, field.name) != field.default]
        return f"ModelConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ConfigError(f"unsupported model family {self.family!r}; use one of {', '.join(FAMILIES)}")
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.experts and not set(self.experts.dense_layers) <= set(range(self.num_layers)):
            raise ConfigError(f"dense_layers={self.experts.dense_layers} must be among {self.num_layers} layers")
        for rope in (self.rope, self.local_rope):
            if rope is not None:
                rope.check(self.head_dim)
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} sliding windows given for {self.num_layers} layers; give one each")

    @property
    def group(self) -> int:
        """Query heads per KV head (G)."""
        return self.num_heads // self.num_kv_heads

    @functools.cached_property
    def layers(self) -> tuple["ModelConfig", ...]:
        """Each layer as a model of that layer alone; equal for layers alike, which then share compiled programs."""
        return tuple(map(self._layer, range(self.num_layers)))

    def _layer(self, i: int) -> "ModelConfig":
        experts = None
        if self.experts is not None and i not in self.experts.dense_layers:
            experts = dataclasses.replace(self.experts, dense_layers=())
        rope = self.rope if self.windows[i] is None or self.local_rope is None else self.local_rope
        return dataclasses.replace(
            self, num_layers=1, windows=self.windows[i : i + 1], rope=rope, local_rope=None, experts=experts)

    @property
    def window(self) -> int | None:
        """Sliding window of the only layer (`layers`)."""
        (window,) = self.windows
        return window

    def for_length(self, tokens: int) -> "ModelConfig":
        """Returns the model for texts of `tokens` tokens, which its rotary embedding may depend on."""
        local = None if self.local_rope is None else self.local_rope.for_length(tokens, self.head_dim)
        return dataclasses.replace(self, rope=self.rope.for_length(tokens, self.head_dim), local_rope=local)
