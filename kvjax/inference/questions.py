"""Questions on their way into a cache: they are encoded, and checked against the cache, before anything is computed."""

from collections.abc import Sequence

from kvjax.errors import ConfigError, FormatMismatch, PromptError
from kvjax.inference import arguments
from kvjax.inference.answers import Asked, Ends
from kvjax.inference.cache import Cache
from kvjax.inference.model import TextModel
from kvjax.inference.sampling import Sampling
from kvjax.inference.stops import Stops


def ask(
    model: TextModel, question, cache: Cache, max_new_tokens: int, sampling: Sampling, seed: int,
    stop: str | Sequence[str], eos: int | Sequence[int] | None,
) -> Asked:
    """Checks the arguments of `LLM.generate`, which see, and encodes the questions.

    Raises:
      PromptError, ConfigError, FormatMismatch: as `LLM.generate`.
    """
    arguments.check_generation(max_new_tokens, sampling, seed)
    stops = Stops(model.tokenizer, arguments.marks(stop, model.tokenizer))
    eos = model.eos_ids if eos is None else arguments.ids("eos", eos, model.config.vocab_size)
    questions = cache.after_pending(encode(model, "questions", question, cache))
    check_room(cache, questions, max_new_tokens)
    kept = () if model.tokenizer is None else model.tokenizer.closing_ids
    ends = Ends(frozenset(eos), frozenset(stops.ids), frozenset(kept))
    return Asked(questions, arguments.is_batch(question), stops, ends)


def encode(model: TextModel, kind: str, text, cache: Cache) -> list[list[int]]:
    """Encodes one text for each sequence of a cache.

    Args:
      model: model with its tokenizer.
      kind: what the texts are, for messages.
      text: text or token ids, or a list with one of either for each sequence of a batch.
      cache: cache that they continue.

    Returns:
      Token ids of each sequence.

    Raises:
      PromptError: a text is invalid, or there is not one for each sequence.
      ConfigError: `cache` is no cache, or is on other devices than the model.
      FormatMismatch: the cache belongs to another model.
    """
    arguments.check_cache(cache)
    if cache.fingerprint != model.fingerprint:
        raise FormatMismatch(f"the cache is of the model {cache.fingerprint!r}, not of {model.fingerprint!r}; "
                             "prefill with this model")
    if cache.plan.layout != model.layout:
        raise ConfigError("cache and model are on different devices; prefill with this model, or load it with the "
                          "mesh= and rules= of the model that made the cache")
    rows = [model.encode(row, start=False) for row in arguments.rows(text)]
    if len(rows) != cache.plan.batch:
        raise PromptError(f"{len(rows)} {kind} for {cache.plan.batch} cached sequences; give one each")
    return rows


def check_room(cache: Cache, questions: list[list[int]], max_new_tokens: int) -> None:
    """Raises PromptError unless the cache has room for token ids of each sequence and as many new ones."""
    needed = max(n + len(q) for n, q in zip(cache.length, questions, strict=True)) + max_new_tokens
    if needed > cache.plan.capacity:
        raise PromptError(
            f"question and answer need up to {needed} tokens but the cache was made for {cache.plan.capacity}; "
            "prefill with a larger capacity or lower max_new_tokens"
        )
