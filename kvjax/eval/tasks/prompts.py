"""Prompts of benchmark files, split into a context to prefill and a question that is read token by token."""

from kvjax.errors import CheckpointError, ConfigError
from kvjax.eval.tasks.base import Request


def split(request: Request, context: str, question: str, chat: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the token ids of context and question, at most `request.length` in all.

    A longer prompt loses its middle.

    Args:
      request: tokenizer and length.
      context: text before the question.
      question: text of the question.
      chat: whether both together are one user message in the model's chat template, if it has one.

    Raises:
      ConfigError: fewer than two tokens fit in the length.
      CheckpointError: the chat template changes the message, or does not work.
    """
    tokenizer, before, after = request.tokenizer, request.start, ""
    first = tuple(tokenizer.encode(context)[len(before):])
    if chat and tokenizer.template is not None:
        opening, after = _wrapping(request)
        before = tuple(tokenizer.encode(opening, add_special_tokens=False))
        first = tuple(tokenizer.encode_continuation(context, before))
    last = tuple(tokenizer.encode_continuation(question, first))
    last += tuple(tokenizer.encode_continuation(after, last))
    room = request.length - len(before)
    if room < 2:
        raise ConfigError(f"no room for a prompt in {request.length} tokens; raise the length")
    if len(first) + len(last) > room:
        half, both = room // 2, first + last
        first, last = both[:half] + both[-half:], last[-half:]
        first = first[: len(first) - len(last)]
    return before + first, last


def _wrapping(request: Request) -> tuple[str, str]:
    """Returns the text that the chat template puts before and after a user message."""
    text = request.tokenizer.apply_chat_template([{"role": "user", "content": "\x00"}])
    before, mark, after = text.partition("\x00")
    if not mark:
        raise CheckpointError(f"{request.tokenizer.directory}: the chat template changes what a message says, so that "
                              "documents cannot be put there")
    return before, after
