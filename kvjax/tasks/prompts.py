"""Prompts of benchmarks in files: the part before the question is read as context, the rest token by token."""

from kvjax.errors import CheckpointError, ConfigError
from kvjax.tasks.base import Request


def split(request: Request, context: str, question: str, chat: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of context and question, at most `request.length` in all: of more the first and the last half is kept.

    With `chat` they are one message to the model, in its chat template if it has one.
    """
    before: tuple[int, ...] = request.start
    after: tuple[int, ...] = ()
    if chat and request.tokenizer.template is not None:
        before, after = _wrapping(request)
    first, last = _ids(request, context), (*_ids(request, question), *after)
    room = request.length - len(before)
    if room < 2:
        raise ConfigError(f"no room for a prompt in {request.length} tokens; raise the length")
    if len(first) + len(last) > room:
        half, both = room // 2, first + last
        first, last = both[:half] + both[-half:], last[-half:]
        first = first[: len(first) - len(last)]
    return before + first, last


def _ids(request: Request, text: str) -> tuple[int, ...]:
    return tuple(request.tokenizer.encode(text, add_special_tokens=False))


def _wrapping(request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the chat template puts before and after one user's message."""
    text = request.tokenizer.apply_chat_template([{"role": "user", "content": "\x00"}])
    before, found, after = text.partition("\x00")
    if not found:
        raise CheckpointError(f"{request.tokenizer.directory}: the chat template changes what a message says, so that "
                              "documents cannot be put there")
    return _ids(request, before), _ids(request, after)
