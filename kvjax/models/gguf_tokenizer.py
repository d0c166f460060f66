"""Tokenizer of a GGUF file: byte-level BPE (`gpt2`), or SentencePiece with scores (`llama`)."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvjax.errors import CheckpointError
from kvjax.models.json_file import shown
from kvjax.models.text_codec import tokenizer_errors
from kvjax.models.tokenizer import TextTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How a text is split into words, by the name in the file: patterns, one after the other.
_SPLITS = {
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LETTERS + r"\p{N}{1,3}" + _REST,),
    "qwen2": (_LETTERS + r"\p{N}" + _REST,),
}
_WITH_START = ("llama-bpe",)  # texts begin with the start token, and whole words are looked up before they are merged
_NORMAL, _CONTROL, _OWN, _BYTE = 1, 3, 4, 6  # `tokenizer.ggml.token_type`
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_LONGEST = 256  # characters of a piece that is merged
_ENDS = ("eos", "eot", "eom")
_PREFIX = "tokenizer.ggml."


class Vocabulary(NamedTuple):
    """Tokenizer of a file, and the fields of config.json that name special tokens."""

    tokenizer: TextTokenizer
    config: dict[str, Any]


def read(file: pathlib.Path, fields: Mapping[str, Any]) -> Vocabulary:
    """Returns the tokenizer of a GGUF file.

    Args:
      file: path of the file, for error messages.
      fields: fields in its header.

    Raises:
      CheckpointError: the tokenizer's kind or its way to split texts is not supported, or a field is wrong.
    """
    source = _TokenizerFields(file, fields)
    kind, tokens, types = source.model, source.tokens, source.types
    with tokenizer_errors(f"{file}: the tokenizer cannot be made"):
        tokenizer = _byte_level(source) if kind == "gpt2" else _sentence_piece(source)
        own = [AddedToken(token, special=kind == _CONTROL, normalized=False)
               for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _OWN)]
        tokenizer.add_tokens(own)
        start = source.id("bos")
        if start is not None and source.begins:
            name = tokens[start]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[name, "$A"], pair=[name, "$A", name, "$B"], special_tokens=[(name, start)])
    ends = tuple(dict.fromkeys(i for i in map(source.id, _ENDS) if i is not None))
    named = {"bos_token": start, "eos_token": source.id("eos"), "unk_token": source.id("unknown"),
             "pad_token": source.id("padding")}
    made = TextTokenizer(
        directory=file, tokenizer=tokenizer, bos_id=start, eos_ids=ends, template=source.template,
        special_tokens={name: tokens[i] for name, i in named.items() if i is not None},
        content=tokenizer.to_str().encode(),
    )
    return Vocabulary(made, {"bos_token_id": start, "eos_token_id": list(ends)})


class _TokenizerFields:
    """Fields of the tokenizer, whose readers raise CheckpointError naming file, field and value."""

    def __init__(self, file: pathlib.Path, fields: Mapping[str, Any]):
        self._file, self._fields = file, fields
        self.model = self._one_of("model", ("gpt2", "llama"))
        self.tokens: list[str] = self._list("tokens", str, None)
        if not self.tokens or len(set(self.tokens)) != len(self.tokens):
            raise self._wrong("tokens", "expected tokens that differ")
        self.types: list[int] = self._list("token_type", int, [_NORMAL] * len(self.tokens), len(self.tokens))

    @property
    def split(self) -> str:
        return self._one_of("pre", tuple(_SPLITS), "default")

    @property
    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) for merge in self._list("merges", str, None)]
        if any(len(pair) != 2 for pair in pairs):
            raise self._wrong("merges", "expected two tokens with a space between them in each")
        return pairs  # type: ignore[return-value]

    @property
    def scores(self) -> list[float]:
        return self._list("scores", float, None, len(self.tokens))

    @property
    def begins(self) -> bool:
        """Whether texts begin with the start token."""
        return self.switch("add_bos_token", self.model == "llama" or self.split in _WITH_START)

    @property
    def template(self) -> str | None:
        template = self._fields.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise CheckpointError(f"{self._file}: tokenizer.chat_template is {shown(template)}; expected a text")
        return template

    def id(self, name: str) -> int | None:
        """Returns the id of a special token, or None."""
        value = self._fields.get(f"{_PREFIX}{name}_token_id")
        if value is not None and not (type(value) is int and 0 <= value < len(self.tokens)):
            raise self._wrong(f"{name}_token_id", f"expected an id of {len(self.tokens)} tokens")
        return value

    def switch(self, name: str, default: bool) -> bool:
        return self._one_of(name, (True, False), default)

    def refuse(self, name: str) -> None:
        """Raises CheckpointError if a field is there, and not false."""
        if self._fields.get(_PREFIX + name):
            raise self._wrong(name, "this is not supported")

    def _one_of(self, name: str, supported: Sequence[Any], default: Any = None) -> Any:
        value = self._fields.get(_PREFIX + name, default)
        if not any(value is one or (isinstance(one, str) and value == one) for one in supported):
            raise self._wrong(name, f"supported: {', '.join(map(str, supported))}")
        return value

    def _list(self, name: str, kind: type, default: list | None, length: int | None = None) -> list[Any]:
        values = self._fields.get(_PREFIX + name, default)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise self._wrong(name, f"expected an array of {kind.__name__}")
        if length is not None and len(values) != length:
            raise self._wrong(name, f"expected {length} of them, one for each token")
        return values

    def _wrong(self, name: str, expected: str) -> CheckpointError:
        value = shown(self._fields.get(_PREFIX + name))
        return CheckpointError(f"{self._file}: {_PREFIX}{name} is {value}; {expected}")


def _byte_level(source: _TokenizerFields) -> Tokenizer:
    """Returns byte-level BPE with the merges and the patterns of the file."""
    ids = {token: i for i, token in enumerate(source.tokens)}
    tokenizer = Tokenizer(models.BPE(ids, source.merges, ignore_merges=source.split in _WITH_START))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[source.split]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=source.switch("add_space_prefix", False), use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(source: _TokenizerFields) -> Tokenizer:
    """Returns BPE that merges first what makes the piece with the highest score, as SentencePiece does."""
    source.refuse("remove_extra_whitespaces")
    source.refuse("precompiled_charsmap")
    ids = {token: i for i, token in enumerate(source.tokens)}
    unknown = source.id("unknown")
    tokenizer = Tokenizer(models.BPE(
        ids, _merges(source, ids), unk_token=None if unknown is None else source.tokens[unknown], fuse_unk=True,
        byte_fallback=_BYTE in source.types,
    ))
    spaced = source.switch("add_space_prefix", True)
    before = [normalizers.Prepend(_SPACE)] if spaced else []
    after = [decoders.Strip(" ", 1, 0)] if spaced else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    return tokenizer


def _merges(source: _TokenizerFields, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns every way to make a piece of two others, best scores first."""
    ways = []
    for piece, kind, score in zip(source.tokens, source.types, source.scores, strict=True):
        if kind == _NORMAL and len(piece) <= _LONGEST:
            pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
            ways += [(-score, ids[left], ids[right], left, right) for left, right in pairs
                     if left in ids and right in ids]
    return [(left, right) for *_, left, right in sorted(ways)]
