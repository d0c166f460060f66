"""Tokens that files other than tokenizer.json define, added to the tokenizer as transformers 5 adds them."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from kvjax.errors import CheckpointError

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_DECODER = "added_tokens_decoder"
_LISTS = ("additional_special_tokens", "extra_special_tokens")

Fields = Mapping[str, Any]
File = tuple[pathlib.Path, Fields]  # path, and the JSON object in it


def named(settings: Fields, special: Fields) -> dict[str, Any]:
    """Returns every `*_token` that is set in the two files, by name.

    Values are texts, or objects with a text as `content`. The special tokens map is the older format: it takes
    precedence if the settings have no `added_tokens_decoder`; if they have one, it only adds names they leave out.

    Args:
      settings: object in tokenizer_config.json.
      special: object in special_tokens_map.json.
    """
    first, last = (special, settings) if _DECODER in settings else (settings, special)
    return _named(first) | _named(last)


def content(token: Any) -> Any:
    """Returns the text of a token in a file, where it is a text or an object with `content`."""
    return token.get("content") if isinstance(token, Mapping) else token


def add(tokenizer: Tokenizer, settings: File, special: File, added: File) -> dict[str, dict[str, Any]]:
    """Adds the tokens of tokenizer_config.json, special_tokens_map.json and added_tokens.json to a tokenizer.

    Tokens with an id come first, in the order of ids; then named ones, which are always special; then those in the
    lists of further special tokens, which do not change existing ones.

    Args:
      tokenizer: tokenizer to add to, in place.
      settings: tokenizer_config.json.
      special: special_tokens_map.json.
      added: added_tokens.json.

    Returns:
      New and changed tokens as in `added_tokens_decoder`: content and flags by id.

    Raises:
      CheckpointError: a token would have another id than the files say, or an entry is not a token.
    """
    before = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    names = named(settings[1], special[1])
    further = dict(token for file in (settings, special) for token in _further(*file))
    apart = {content(value) for value in names.values()} | set(further)
    stated = [*_by_id(*settings), *_by_text(*added, apart)]
    tokens: dict[str, AddedToken] = {}
    for _, token, path in sorted(stated, key=lambda entry: entry[0]):
        known = before.get(token.content) if path == added[0] else None
        tokens.setdefault(token.content, known or token)
    for name, value in names.items():
        token = _token(value, settings[0], name)
        known = tokens.get(token.content) or before.get(token.content) or token
        tokens[token.content] = AddedToken(known.content, **_flags(known) | {"special": True})
    for text, token in further.items():
        if text not in before:
            tokens.setdefault(text, token)
    tokenizer.add_tokens([token for token in tokens.values() if token.content])
    for i, token, path in stated:
        if token.content and tokenizer.token_to_id(token.content) != i:
            raise CheckpointError(f"{path}: the token {token.content!r} is to have the id {i}, but with tokenizer.json "
                                  f"it has {tokenizer.token_to_id(token.content)}; download both files again")
    after = sorted(tokenizer.get_added_tokens_decoder().items())
    return {str(i): {"content": token.content, **_flags(token)} for i, token in after
            if token.content not in before or _flags(before[token.content]) != _flags(token)}


def _named(fields: Fields) -> dict[str, Any]:
    more = fields.get("extra_special_tokens")
    every = dict(fields) | (more if isinstance(more, dict) else {})
    return {name: value for name, value in every.items() if name.endswith("_token") and isinstance(content(value), str)}


def _further(path: pathlib.Path, fields: Fields) -> Iterator[tuple[str, AddedToken]]:
    """Yields text and token of each entry in the lists of further special tokens."""
    for name in _LISTS:
        values = fields.get(name) or []
        if not isinstance(values, list | dict):
            raise CheckpointError(f"{path}: {name} is {values!r:.80}; expected a list of tokens")
        for value in values.values() if isinstance(values, dict) else values:
            token = _token(value, path, name)
            yield token.content, token


def _by_id(path: pathlib.Path, fields: Fields) -> Iterator[tuple[int, AddedToken, pathlib.Path]]:
    """Yields id, token and path of each entry of `added_tokens_decoder`."""
    entries = fields.get(_DECODER) or {}
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: {_DECODER} is {entries!r:.80}; expected tokens by their ids")
    for key, value in entries.items():
        if not (key.isascii() and key.isdigit() and isinstance(value, dict)):
            raise CheckpointError(f"{path}: {_DECODER} has {key!r}: {value!r:.80}; expected an id and a token's object")
        yield int(key), _token({"special": False} | value, path, _DECODER), path


def _by_text(
    path: pathlib.Path, fields: Fields, special: set[str]
) -> Iterator[tuple[int, AddedToken, pathlib.Path]]:
    """Yields id, token and path of each entry of added_tokens.json, special if another file names it."""
    for text, i in fields.items():
        if type(i) is not int or i < 0:
            raise CheckpointError(f"{path}: the token {text!r} has the id {i!r:.80}; expected an integer of at least 0")
        yield i, AddedToken(text, special=text in special), path


def _token(value: Any, path: pathlib.Path, name: str) -> AddedToken:
    """Returns a token given as a text or an object; special unless it says otherwise."""
    flags = {flag: value[flag] for flag in _FLAGS if flag in value} if isinstance(value, dict) else {}
    text = content(value)
    if not isinstance(text, str) or not all(type(flag) is bool for flag in flags.values()):
        raise CheckpointError(f"{path}: {name} has {value!r:.80}; expected a token's text, or an object with its "
                              "content and flags")
    return AddedToken(text, **{"special": True} | flags)


def _flags(token: AddedToken) -> dict[str, bool]:
    return {flag: getattr(token, flag) for flag in _FLAGS}
