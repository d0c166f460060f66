"""Configuration of a decoder-only model of the Llama family, as a hashable value."""

import dataclasses

from kvjax.errors import ConfigError
from kvjax.ops.rotary import RopeConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position",
)


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

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ConfigError(f"unsupported model family {self.family!r}; use one of {', '.join(FAMILIES)}")
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        self.rope.check(self.head_dim)
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} sliding windows given for {self.num_layers} layers; give one each")

    @property
    def group(self) -> int:
        """Query heads per KV head (G)."""
        return self.num_heads // self.num_kv_heads

    def for_length(self, tokens: int) -> "ModelConfig":
        """Returns the model for texts of `tokens` tokens, which its rotary embedding may depend on."""
        return dataclasses.replace(self, rope=self.rope.for_length(tokens, self.head_dim))
