"""Tokenizer and chat template of a Hugging Face model directory."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from kvjax import _files
from kvjax.errors import CheckpointError, PromptError
from kvjax.models import added_tokens, chat_template, json_file
from kvjax.models.json_file import read_optional_json
from kvjax.models.text_codec import TextCodec, tokenizer_errors

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
_MOST_BYTES = 1 << 28  # limit for a file; the largest tokenizers have 35 MB


@dataclasses.dataclass(frozen=True, eq=False)
class TextTokenizer:
    """Tokenizer of a model directory; created by `TextTokenizer.from_directory`.

    directory        model directory, for error messages
    tokenizer        tokenizer.json with the tokens that other files add, without truncation and padding
    special_tokens   texts of the special tokens, by their names in chat templates, such as `bos_token`
    eos_ids          ids that end a generation
    bos_id           id that begins a text, if the model has one
    template         source of the chat template, if the model has one
    content          bytes of tokenizer.json
    added            tokens that other files add or change: content and flags by id, as in `added_tokens_decoder`
    """

    directory: pathlib.Path
    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    template: str | None
    content: bytes
    added: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """The first 16 hex digits of the SHA-256 of tokenizer.json and the tokens added to it."""
        digest = hashlib.sha256(self.content)
        if self.added:
            digest.update(json.dumps(self.added, sort_keys=True).encode())
        return digest.hexdigest()[:16]

    @classmethod
    def from_directory(cls, directory: json_file.Path) -> "TextTokenizer":
        """Reads the tokenizer of a model directory.

        Reads tokenizer.json, and tokenizer_config.json, special_tokens_map.json, added_tokens.json and
        chat_template.jinja if they exist; end-of-text ids come from the model's configuration, too.

        Raises:
          CheckpointError: tokenizer.json is missing, or one of the files is corrupt.
        """
        root = json_file.model_directory(directory)
        content = _read_tokenizer(root / TOKENIZER)
        tokenizer = _parse_tokenizer(root / TOKENIZER, content)
        settings, special_map, more = (
            (root / name, read_optional_json(root / name)) for name in (SETTINGS, SPECIAL_TOKENS, ADDED_TOKENS)
        )
        with tokenizer_errors(f"{root}: tokens of other files cannot be added to {TOKENIZER}"):
            added = added_tokens.add(tokenizer, settings, special_map, more)
        named = added_tokens.named(settings[1], special_map[1])
        special = {name: added_tokens.content(token) for name, token in named.items()}
        return cls(
            directory=root,
            tokenizer=tokenizer,
            special_tokens=special,
            eos_ids=_eos_ids(root, tokenizer, special),
            bos_id=_id_of(tokenizer, special.get("bos_token")),
            template=_template(root, settings[1]),
            content=content,
            added=added,
        )

    @contextlib.contextmanager
    def saving(self, directory: json_file.Path) -> Iterator[None]:
        """Writes files that `from_directory` and transformers read; they replace older ones when the context ends."""
        root = pathlib.Path(directory).expanduser()
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        if self.added:
            settings["added_tokens_decoder"] = self.added
        if self.template is not None:
            settings["chat_template"] = self.template
        with _files.replacing(root / TOKENIZER) as tokenizer, _files.replacing(root / SETTINGS) as beside:
            tokenizer.write_bytes(self.content)  # unchanged, as the fingerprint depends on it
            beside.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            yield
        for name in (TEMPLATE, SPECIAL_TOKENS, ADDED_TOKENS):  # of an earlier model; they would be read as well
            (root / name).unlink(missing_ok=True)

    @functools.cached_property
    def codec(self) -> TextCodec:
        """Codec for texts in pieces, without the special tokens around a whole text."""
        return TextCodec(self.tokenizer, str(self.directory))

    @functools.cached_property
    def special_ids(self) -> dict[str, int]:
        """Ids of the special tokens, which `decode` leaves out, by their texts."""
        return {text: i for i, text in self.codec.special.items()}

    @functools.cached_property
    def start_ids(self) -> tuple[int, ...]:
        """Ids that every text begins with. Ids that some tokenizers append are left out: a prompt goes on."""
        with tokenizer_errors(f"{self.directory}: the tokenizer cannot encode a text"):
            made = self.tokenizer.encode("a")
        return tuple(made.ids[: made.special_tokens_mask.index(0)] if 0 in made.special_tokens_mask else made.ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text that nothing precedes.

        Args:
          text: text to encode.
          add_special_tokens: whether to put `start_ids` before the text unless it begins with them; pass False for text
            from `apply_chat_template`, which has its own.

        Raises:
          PromptError: the text contains half a surrogate pair.
          CheckpointError: the tokenizer fails.
        """
        ids, start = self.codec.encode(text), list(self.start_ids)
        return ids if not add_special_tokens or ids[: len(start)] == start else start + ids

    def encode_continuation(self, text: str, before: Sequence[int] = ()) -> list[int]:
        """Returns the token ids of a text that continues another one (`TextCodec.encode_continuation`)."""
        return self.codec.encode_continuation(text, before)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` without special tokens."""
        return self.codec.decode(ids)

    def decode_continuation(self, ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Returns the text that `ids` add to the text before them (`TextCodec.decode_continuation`)."""
        return self.codec.decode_continuation(ids, before)

    @functools.cached_property
    def closing_ids(self) -> tuple[int, ...]:
        """Special token that the chat template puts right after an answer; () if it puts none there."""
        answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\x00"}]
        try:
            text = self.apply_chat_template(answered, add_generation_prompt=False) if self.template else ""
        except (CheckpointError, PromptError):  # the template accepts no such conversation
            return ()
        behind = self.encode(text.rpartition("\x00")[2], add_special_tokens=False)[:1]
        return tuple(i for i in behind if i in self.special_ids.values())

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns a conversation as text in the form that the model was trained on.

        Args:
          messages: each with a role and a content.
          add_generation_prompt: whether to append the beginning of the model's answer.
          **variables: whatever else the template asks for, of JSON's types, such as `enable_thinking`, or `tools` and
            `documents`, which are None unless they are given.

        Raises:
          CheckpointError: the model has no chat template, or one that is broken or exceeds the limits of
            `kvjax.models.chat_template`.
          PromptError: the template refuses the messages, or a variable is not of JSON's types.
        """
        if self.template is None:
            raise CheckpointError(
                f"{self.directory}: no chat template in {SETTINGS} or {TEMPLATE}; encode plain text for a base model"
            )
        # Templates compare `tools` and `documents` with none, which an undefined name does not equal.
        names = {"tools": None, "documents": None, **self.special_tokens, **variables, "messages": list(messages),
                 "add_generation_prompt": add_generation_prompt}
        return chat_template.render(self.template, names, str(self.directory))


def _read_tokenizer(path: pathlib.Path) -> bytes:
    try:
        return _files.read_regular(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); only fast tokenizers are supported") from error


def _parse_tokenizer(path: pathlib.Path, content: bytes) -> Tokenizer:
    with tokenizer_errors(f"{path}: not a tokenizer"):
        tokenizer = Tokenizer.from_buffer(content)
    # Some files hold the settings of a training run, which would truncate or pad every text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _eos_ids(root: pathlib.Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the ids in both model files, to which chat models add their end of turn, and the tokenizer's own."""
    paths = (root / json_file.GENERATION, root / json_file.CONFIG)
    stated = [i for path in paths for i in json_file.token_ids("eos_token_id", (path, read_optional_json(path)))]
    own = _id_of(tokenizer, special.get("eos_token"))
    return tuple(dict.fromkeys(stated if own is None else [*stated, own]))


def _id_of(tokenizer: Tokenizer, token: str | None) -> int | None:
    return None if token is None else tokenizer.token_to_id(token)


def _template(root: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    """Returns the template from its own file, or else from the settings; the one named default if there are several."""
    file = root / TEMPLATE
    if os.path.lexists(file):
        try:
            return _files.read_regular(file, _MOST_BYTES).decode("utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error}); download the file again") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", list(named))
    if not isinstance(template, str | None):
        raise CheckpointError(f"{root / SETTINGS}: chat_template is {template!r}; expected text or a list with default")
    return template
