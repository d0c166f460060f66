"""SentenceKV (Zhu et al., 2025): sentences of the prompt, ranked by the mean of their keys.

The prompt is cut at sentence ends. Only the tokens that its last queries attend most are kept, `keep` times as many as
a step attends. The kept tokens of a sentence are a block: their mean key stays in memory, and they are read when the
query is close to the mean.

Sentences are cut as in DynSplit-KV with `splitting="sentence"` (`kvjax.methods.shared.segments`), which needs a table
of delimiters. A sentence has from `shortest` to chunk + deviation tokens: shorter ones are joined with the next, longer
ones are cut.

Aggregation: q . mean key is averaged over the query heads of a KV head ("mean"), and so are the observation-window
scores of the tokens to keep.

Differences from the paper:
  - The query is that of the newest token. The paper averages the queries of the sentence that is being generated.
  - Generated tokens become sentences of their own once they leave the window, and are all kept. In the paper they stay
    in memory.
  - The best sentences fill the budget, the last one in part. Sinks and window count in it, as in every method here.

Resident: D numbers per sentence. Cost per step: one score per sentence, then the kept tokens of the best ones. Since
few tokens of a sentence may be kept, many blocks are read per step, and on a store their slots are mostly empty. Blocks
have room for the longest sentence, and there are enough of them for the shortest: in memory they take
(chunk + deviation) / shortest times the size of the tokens.
"""

import dataclasses
import math

import jax.numpy as jnp

from kvjax.cache.method import HowPlaced, Method
from kvjax.cache.types import Placement
from kvjax.errors import ConfigError
from kvjax.methods.dynsplit import DynSplit
from kvjax.methods.shared.eviction import check_room, largest
from kvjax.methods.shared.observation import observation_scores, over_group, stays


@dataclasses.dataclass(frozen=True)
class SentenceKV(DynSplit):
    """A cache of sentences, ranked by the product of the query with the mean of their keys.

    Attributes:
      keep: tokens of the prompt that each KV head keeps, in multiples of the selected rows (the paper's semantic
        keeping factor; the default of 2 is not from the paper); None = all tokens.

    Raises:
      ConfigError: `splitting` is not "sentence", `keep` is below 1 or infinite, or `keep` is set without observed
        queries.
    """

    aggregation: str = "mean"
    observation: int | None = 32
    splitting: str = "sentence"
    vectors: str = "mean"
    chunk: int = 28
    shortest: int = 8
    keep: float | None = 2.0

    def __post_init__(self):
        if self.splitting != "sentence":
            raise ConfigError(f"splitting={self.splitting!r} of sentencekv must be 'sentence' (dynsplit has others)")
        super().__post_init__()
        if self.keep is not None and not 1 <= self.keep < math.inf:
            raise ConfigError(f"keep={self.keep} of sentencekv must be finite and at least 1, or None to keep all")
        if self.keep is not None and self.observation == 0:
            raise ConfigError("sentencekv keeps the tokens that a prompt's last queries attend, and observation=0 "
                              "observes no query; raise it, or keep all tokens with keep=None")

    @property
    def name(self):
        return Method.name.fget(self)

    @property
    def evicts(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether tokens of the prompt are dropped."""
        return self.keep is not None

    @property
    def observed(self) -> int | None:
        """Queries by which the tokens to keep are chosen, if not all are kept."""
        return 0 if self.keep is None else self.observation

    @property
    def whole_prompts(self) -> bool:  # type: ignore[override]
        """Whether the whole prompt has to be seen at once, because tokens are dropped when it is read."""
        return self.keep is not None

    @property
    def placement(self) -> HowPlaced:  # type: ignore[override]  # a class attribute elsewhere
        """Tokens are placed for each head where each drops tokens of its own choice."""
        return "alike" if self.keep is None else "per_head"

    def spec(self, *, kv_heads, group, head_dim, capacity):
        spec = super().spec(kv_heads=kv_heads, group=group, head_dim=head_dim, capacity=capacity)
        return check_room(self.name, spec)

    def blocks(self, capacity, rows):
        num_blocks, block_rows, max_blocks, held = super().blocks(capacity, rows)
        # A single token may be kept of a sentence, and the budget should still be used up.
        return num_blocks, block_rows, max_blocks if self.keep is None else max(1, rows), held

    def build(self, spec, index, context):
        index, whole = super().build(spec, index, context)
        if self.keep is None:
            return index, whole
        observed = over_group(observation_scores(spec, context), self.aggregation)
        kept = largest(jnp.where(stays(spec, context), observed, -jnp.inf), int(self.keep * spec.selected_rows))
        before = jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - kept
        begin = jnp.arange(context.pos.shape[0], dtype=jnp.int32) - whole.row  # its sentence's first token
        row = before - jnp.take_along_axis(before, begin, axis=-1)
        placement = Placement(jnp.where(kept, whole.block, spec.num_blocks), row.astype(jnp.int32))
        vectors = type(index.vectors).empty(spec).take(placement.block, context.key)
        return dataclasses.replace(index, vectors=vectors), placement

    def append(self, spec, index, view, evicted):
        index, placement = super().append(spec, index, view, evicted)
        head, block = jnp.arange(spec.kv_heads, dtype=jnp.int32), jnp.minimum(placement.block, spec.num_blocks - 1)
        return index, Placement(placement.block, view.count[head, block])
