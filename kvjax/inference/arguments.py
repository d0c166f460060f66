"""Checks of the arguments of the three-line API, made before anything is computed or written."""

from collections.abc import Sequence

from kvjax import _validate
from kvjax.cache.method import Method
from kvjax.errors import ConfigError, PromptError
from kvjax.inference.cache import Cache
from kvjax.inference.plan import Slots
from kvjax.inference.sampling import Sampling
from kvjax.store.interface import is_store


def check_kinds(method, store, slots) -> None:
    """Raises ConfigError if arguments of `prefill` are of the wrong kind, or `slots` would have no effect."""
    check_method_and_slots(method, slots)
    if store is not None and not is_store(store):
        raise ConfigError(f"store={store!r} is no store; give one such as kvjax.FlashStore(file=path), or None")
    if slots is not None and store is None and not slots.for_memory:
        raise ConfigError("`slots` other than offload= are for blocks in a store; give a store such as "
                          "kvjax.HostStore() with them, or leave them out")


def check_in_memory(store, slots) -> None:
    """Raises ConfigError if a cache on a mesh is to have blocks or layers in a store."""
    if store is not None or slots is not None:
        raise ConfigError("caches on a mesh are in memory; leave out store= and slots=, or load the model without mesh")


def check_method_and_slots(method, slots) -> None:
    """Raises ConfigError unless these are a method and slots, or None."""
    if not isinstance(method, Method | None):
        raise ConfigError(f"method={method!r} is no method; give one such as kvjax.Quest(budget=256)")
    if not isinstance(slots, Slots | None):
        raise ConfigError(f"`slots` must be a kvjax.Slots or None, got slots={slots!r}")


def check_cache(cache) -> None:
    """Raises ConfigError unless this is a cache; a likely mistake is the result that contains it."""
    if not isinstance(cache, Cache):
        raise ConfigError(f"{type(cache).__name__} is no cache; give what prefill returned, or a result's .cache")


def check_generation(max_new_tokens, sampling, seed) -> None:
    """Raises PromptError for an invalid length of the answer, ConfigError for invalid sampling settings."""
    if not _validate.whole(max_new_tokens, 0):
        raise PromptError(f"max_new_tokens={max_new_tokens!r} must be a whole number, and not negative")
    if not isinstance(sampling, Sampling):
        raise ConfigError(f"`sampling` must be a kvjax.Sampling, got {sampling!r}")
    if not _validate.whole(seed, 0) or seed >= 2**32:  # JAX would drop the upper bits of a larger one
        raise ConfigError(f"seed={seed!r} must be a whole number from 0 to 2^32 - 1")


def marks(stop, tokenizer) -> tuple[str, ...]:
    """Returns the texts that end an answer.

    Args:
      stop: a text, or a sequence of texts.
      tokenizer: tokenizer of the model; None = it has none.

    Returns:
      The texts.

    Raises:
      ConfigError: one is empty or not a text, or the model has no tokenizer to find them with.
    """
    texts = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else (stop,)
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"stop={stop!r} must be a text or several, none of them empty; () for none")
    if texts and tokenizer is None:
        raise ConfigError("stop= is text, but this model has no tokenizer.json; cut the answer's tokens yourself")
    return texts


def ids(name: str, given, vocabulary: int) -> tuple[int, ...]:
    """Returns token ids given as one or several; raises ConfigError if the model does not have one of them."""
    several = (given,) if _validate.whole(given) else given
    if not _is_row(several) or isinstance(several, str) or not all(
        _validate.whole(token, 0) and token < vocabulary for token in several
    ):
        raise ConfigError(f"{name}={given!r:.80} must be one or several token ids from 0 to {vocabulary - 1}")
    return tuple(map(int, several))


def is_batch(text) -> bool:
    """Returns True for several texts or sequences of token ids, False for a single one."""
    if isinstance(text, str) or not _is_row(text) or len(text) == 0:
        return False
    return isinstance(text[0], str) or _is_row(text[0])


def _is_row(given) -> bool:
    return isinstance(given, Sequence) or getattr(given, "ndim", 0) > 0


def rows(text) -> list:
    """Returns a list with one text or sequence of token ids for each sequence of a batch."""
    return list(text) if is_batch(text) else [text]
