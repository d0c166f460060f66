"""Texts of the kinds that the source of the run-length cache has: chats, documentation and code, all held out."""

import numpy as np

from experiments.texts import Texts
from kvjax.errors import ConfigError

KINDS = ("chat", "documentation", "code")
_SYSTEM = "\nSystem: You are a helpful assistant. Answer the user's question in a short and friendly way.\n"
_TURN = 24  # tokens of one message


def draw(texts: Texts, kind: str, number: int, length: int) -> list[int]:
    """Returns text `number` of a kind, `length` tokens; raises ConfigError for an unknown kind."""
    if kind == "documentation":
        return texts.draw("prose", number, 0, length)
    if kind == "code":
        return texts.draw("code", number, 0, length)
    if kind != "chat":
        raise ConfigError(f"unknown kind of text {kind!r}; use some of {', '.join(KINDS)}")
    return _chat(texts, number, length)


def _chat(texts: Texts, number: int, length: int) -> list[int]:
    """Returns turns of documentation text with the same system message and the same names before each."""
    words = np.asarray(texts.draw("prose", number, 0, length))
    system, user, assistant = (texts.llm.encode(text, start=False) for text in (_SYSTEM, "\nUser: ", "\nAssistant: "))
    tokens, position = words[:1].tolist(), 1
    while len(tokens) < length:
        tokens += system
        for name in (user, assistant):
            tokens += [*name, *words[position : position + _TURN].tolist()]
            position += _TURN
    return tokens[:length]
