"""Configuration of a decoder-only model of the Llama family, as a hashable value."""

import dataclasses

from kvjax.errors import ConfigError
from kvjax.ops.rotary import RopeConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen2_moe", "qwen3_moe")
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position",
)


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


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and switches of a model; `windows[i]` is layer i's sliding window in tokens, or None."""

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
        self.rope.check(self.head_dim)
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} sliding windows given for {self.num_layers} layers; give one each")

    def __repr__(self) -> str:
        # As in RopeConfig: fields that came after the first 20 are left out where they say nothing.
        shown = [f.name for i, f in enumerate(dataclasses.fields(self)) if i < 20 or getattr(self, f.name) != f.default]
        return f"ModelConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def group(self) -> int:
        """Query heads per KV head (G)."""
        return self.num_heads // self.num_kv_heads

    def is_sparse(self, layer: int) -> bool:
        """Returns whether a layer has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def for_length(self, tokens: int) -> "ModelConfig":
        """Returns the model for texts of `tokens` tokens, which its rotary embedding may depend on."""
        return dataclasses.replace(self, rope=self.rope.for_length(tokens, self.head_dim))
