"""A model with its tokenizer: its token ids, its digests, and what was fitted to it."""

import functools
import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.method import Method
from kvjax.errors import ConfigError, PromptError
from kvjax.models.config import ModelConfig
from kvjax.models.mesh import MeshLayout
from kvjax.models.tokenizer import TextTokenizer
from kvjax.ops.weights import parameters, types_of
from kvjax.typing import PyTree

_SAMPLE = 1024  # weights of each array that enter the digests


class TextModel:
    """A model with its tokenizer, which do not change.

    Attributes:
      config: configuration of the model.
      params: weights.
      tokenizer: tokenizer; None = the model takes token ids only.
      folder: where files that were fitted to the model are looked for, such as KVSwap's adapters: `DIR/kvjax` of a
        model directory, `FILE.kvjax` of a GGUF file; None = nowhere.
      layout: how the model is divided on a mesh (`kvjax.models.mesh`); None = it is on one device.
    """

    def __init__(
        self, config: ModelConfig, params: PyTree, tokenizer: TextTokenizer | None, folder: pathlib.Path | None,
        layout: MeshLayout | None,
    ):
        self.config, self.tokenizer, self.folder, self.layout = config, tokenizer, folder, layout
        self.params = params if layout is None else layout.place(config, params)

    def __repr__(self) -> str:
        config, leaves = self.config, parameters(self.params)
        count, mib = sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves) / 2**20
        return (f"{type(self).__name__}({config.family}, {config.num_layers} layers, {count / 1e6:,.1f} M parameters "
                f"in {types_of(self.params)}, {mib:,.1f} MiB)")

    def encode(self, text, start: bool) -> list[int]:
        """Encodes a text.

        Args:
          text: a string, or a sequence of token ids, which is returned as a list.
          start: True = the text begins a sequence, so the tokenizer's start tokens are put before it unless it begins
            with them; False = it continues another text.

        Returns:
          Token ids.

        Raises:
          PromptError: `text` is neither a string nor token ids, or the model does not have one of its tokens.
          ConfigError: `text` is a string and the model has no tokenizer.
        """
        if not isinstance(text, str):
            return self._known(text)
        if self.tokenizer is None:
            raise ConfigError("this model has no tokenizer.json; give token ids instead of text")
        return self._known(self.tokenizer.encode(text) if start else self.tokenizer.encode_continuation(text))

    def _known(self, ids) -> list[int]:
        """Returns token ids as a list; raises PromptError unless the model has all of them."""
        try:
            given = np.asarray(ids)
        except ValueError:  # rows of several lengths
            given = np.empty((0, 0))
        if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
            raise PromptError(f"{ids!r:.80} is no text and no sequence of token ids; give one of them")
        known, size = given.astype(int).tolist(), self.config.vocab_size
        unknown = [token for token in known if not 0 <= token < size]
        if unknown:
            raise PromptError(f"token id {unknown[0]} is outside the model's vocabulary, 0 to {size - 1}; encode the "
                              "text with the model's own tokenizer")
        return known

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation: those in the model's files and the tokenizer's own."""
        return tuple(dict.fromkeys((*self.config.eos_token_ids, *(self.tokenizer.eos_ids if self.tokenizer else ()))))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of model configuration, a sample of the weights, and tokenizer, which a store checks when opened."""
        return self._digest(self._sampled)

    @functools.cached_property
    def identity(self) -> str:
        """Digest for settings fitted to a model, such as adapters.

        Unlike in `fingerprint`, weights are rounded to bfloat16 first, so the model is the same whether it was loaded
        in that type or in float32. In few bits it is another one.
        """
        return self._digest([weights.astype(jnp.bfloat16) for weights in self._sampled])

    @functools.cached_property
    def _sampled(self) -> list[np.ndarray]:
        """A sample of the weights of each array."""
        return [np.asarray(leaf.reshape(-1)[:: max(1, leaf.size // _SAMPLE)]) for leaf in jax.tree.leaves(self.params)]

    def _digest(self, weights: list[np.ndarray]) -> str:
        digest = hashlib.sha256(repr(self.config).encode())
        for sample in weights:
            digest.update(sample.tobytes())
        return f"{digest.hexdigest()[:16]}-{self.tokenizer.fingerprint if self.tokenizer else 'none'}"

    def with_fitted(self, method: Method) -> Method:
        """Returns a method with what was fitted to this model and lies beside it (`Method.for_model`).

        Raises:
          FormatMismatch: the method was given something that was fitted to another model.
          ReadFailed, ChecksumMismatch: a file beside the model is damaged.
        """
        method.check_model(self.identity)
        if self.folder is None:
            return method
        config = self.config
        return method.for_model(self.folder, self.identity, (config.num_layers, config.num_kv_heads, config.head_dim))
