"""What the three-line API is given: checked before anything is computed or written."""

from collections.abc import Sequence

from kvjax import _validate
from kvjax.cache.method import Method
from kvjax.errors import ConfigError, PromptError
from kvjax.inference.cache import Cache
from kvjax.inference.plan import Slots
from kvjax.inference.sampling import Sampling
from kvjax.store.interface import is_store


def check_kinds(method, store, slots) -> None:
    """Raises ConfigError for arguments of `prefill` that are no method or store, or have no effect."""
    check_method_and_slots(method, slots)
    if store is not None and not is_store(store):
        raise ConfigError(f"store={store!r} is no store; give one such as kvjax.FlashStore(path), or None for memory")
    if slots is not None and store is None and not slots.for_memory:
        raise ConfigError("slots are for blocks on a store, but for where layers are parked; give a store such as "
                          "kvjax.HostStore() beside them")


def check_method_and_slots(method, slots) -> None:
    """Raises ConfigError for what is none."""
    if not isinstance(method, Method | None):
        raise ConfigError(f"method={method!r} is no method; give one such as kvjax.Quest(budget=256)")
    if not isinstance(slots, Slots | None):
        raise ConfigError(f"slots={slots!r} are none; give kvjax.Slots(...), or None")


def check_cache(cache) -> None:
    """Raises ConfigError for what is no cache, above all the result that has one."""
    if not isinstance(cache, Cache):
        raise ConfigError(f"{type(cache).__name__} is no cache; give what prefill returned, or a result's .cache")


def check_generation(max_new_tokens, sampling, seed) -> None:
    """Raises PromptError for a length of the answer, ConfigError for a way to sample it, that are none."""
    if not _validate.whole(max_new_tokens, 0):
        raise PromptError(f"max_new_tokens={max_new_tokens!r} must be a whole number, and not negative")
    if not isinstance(sampling, Sampling):
        raise ConfigError(f"sampling={sampling!r} is none; give kvjax.Sampling(temperature=...)")
    if not _validate.whole(seed, 0) or seed >= 2**32:  # of more bits JAX drops the upper ones
        raise ConfigError(f"seed={seed!r} must be a whole number from 0 to 2^32 - 1")


def marks(stop, tokenizer) -> tuple[str, ...]:
    """The texts that end an answer. Raises ConfigError for others, and where there is no text to find them in."""
    found = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else (stop,)
    if not all(isinstance(one, str) and one for one in found):
        raise ConfigError(f"stop={stop!r} must be a text or several, none of them empty; () for none")
    if found and tokenizer is None:
        raise ConfigError("stop= is text, and this model has no tokenizer.json; cut the tokens of the answer yourself")
    return found


def is_batch(text) -> bool:
    """Whether these are several texts or sequences of token ids, not one."""
    if isinstance(text, str) or not _is_row(text) or len(text) == 0:
        return False
    return isinstance(text[0], str) or _is_row(text[0])


def _is_row(given) -> bool:
    return isinstance(given, Sequence) or getattr(given, "ndim", 0) > 0


def rows(text) -> list:
    """One text or sequence of token ids for each sequence of a batch."""
    return list(text) if is_batch(text) else [text]
