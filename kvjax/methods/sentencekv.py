"""SentenceKV (Zhu et al., 2025): sentences of the prompt, each known by the mean of its keys.

The prompt is cut at sentence ends. Of its tokens only those that its last queries pay most attention to are kept at
all, `keep` times as many as a step attends. What is kept of a sentence is a block: its mean key stays in memory, and
its tokens are read when the query is near the mean.

Cutting is that of DynSplit-KV with `splitting="sentence"` (`kvjax.methods.shared.segments`), so a table of delimiters
is needed, and a sentence has `shortest` to chunk + deviation tokens: shorter ones go on into the next, longer ones are
cut.

Aggregation: q . mean key, averaged over the query heads of a KV head ("mean"); votes for the tokens to keep, likewise.

Differences from the paper:
  - the query is that of the newest token; the paper averages the queries of the sentence that is being generated.
  - generated tokens become sentences of their own once they leave the window, and are all kept; in the paper they stay
    in memory.
  - the best sentences fill the budget, the last one in part; sinks and window are in it, as for every method here.

Resident: D numbers per sentence. Cost per step: one score per sentence, then the kept tokens of the best ones. As few
tokens of a sentence may be kept, many blocks are read per step, and on a store the slots for them are mostly empty.
Blocks have room for the longest sentence, and there are enough for the shortest: in memory they take
(chunk + deviation) / shortest times what the tokens would.
"""

import dataclasses
import math

import jax.numpy as jnp

from kvjax.cache.method import Method, Placement
from kvjax.errors import ConfigError
from kvjax.methods.dynsplit import DynSplit
from kvjax.methods.shared.eviction import check_room, largest
from kvjax.methods.shared.observation import observation_scores, over_group, stays


@dataclasses.dataclass(frozen=True)
class SentenceKV(DynSplit):
    """Sentences ranked by the product of the query with the mean of their keys.

    Attributes:
      keep: tokens of the prompt that each KV head keeps, in multiples of the selected rows (the paper's semantic
        keeping factor, of which 2 is our choice); None = all of them.
    """

    aggregation: str = "mean"
    observation: int | None = 32
    splitting: str = "sentence"
    vectors: str = "mean"
    chunk: int = 28
    shortest: int = 8
    keep: float | None = 2.0

    def __post_init__(self):
        super().__post_init__()
        if self.splitting != "sentence" or (self.keep is not None and not 1 <= self.keep < math.inf):
            raise ConfigError(f"sentencekv has splitting='sentence', not {self.splitting!r} (that is dynsplit), and "
                              f"keep={self.keep} must be finite and at least 1, or None to keep all")
        if self.keep is not None and self.observation == 0:
            raise ConfigError("sentencekv drops what a prompt's last queries do not attend; observation=0 is none: "
                              "raise it, or keep all with keep=None")

    @property
    def name(self):
        return Method.name.fget(self)

    @property
    def evicts(self) -> bool:  # type: ignore[override]  # of the class elsewhere, of its settings here
        """Whether tokens of the prompt are dropped."""
        return self.keep is not None

    @property
    def whole_prompts(self) -> bool:  # type: ignore[override]
        """Tokens are dropped when the prompt is read, and not later."""
        return self.keep is not None

    @property
    def places_alike(self) -> bool:  # type: ignore[override]  # of the class elsewhere, of its settings here
        """Not where each head drops other tokens of the prompt."""
        return self.keep is None

    def spec(self, *, kv_heads, group, head_dim, capacity):
        spec = super().spec(kv_heads=kv_heads, group=group, head_dim=head_dim, capacity=capacity)
        return check_room(self.name, spec)

    def blocks(self, capacity, rows):
        num_blocks, block_rows, max_blocks, held = super().blocks(capacity, rows)
        # A sentence may have kept a single token, and the budget is to be used up nevertheless.
        return num_blocks, block_rows, max_blocks if self.keep is None else max(1, rows), held

    def build(self, spec, index, context):
        index, whole = super().build(spec, index, context)
        if self.keep is None:
            return index, whole
        paid = over_group(observation_scores(spec, context), self.aggregation)
        kept = largest(jnp.where(stays(spec, context), paid, -jnp.inf), int(self.keep * spec.selected_rows))
        before = jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - kept
        begin = jnp.arange(context.pos.shape[0], dtype=jnp.int32) - whole.row  # of each token's sentence
        row = before - jnp.take_along_axis(before, begin, axis=-1)
        placement = Placement(jnp.where(kept, whole.block, spec.num_blocks), row.astype(jnp.int32))
        vectors = type(index.vectors).empty(spec).take(placement.block, context.key)
        return dataclasses.replace(index, vectors=vectors), placement

    def append(self, spec, index, view, evicted):
        index, placement = super().append(spec, index, view, evicted)
        head, block = jnp.arange(spec.kv_heads, dtype=jnp.int32), jnp.minimum(placement.block, spec.num_blocks - 1)
        return index, Placement(placement.block, view.count[head, block])
