"""Text to token ids and back, and chat templates, as a Hugging Face model directory defines them."""

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
from kvjax.models import added_tokens, chat_template, hf_config
from kvjax.models.hf_config import read_optional_json
from kvjax.models.text_codec import TextCodec, tokenizer_errors

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
_MOST_BYTES = 1 << 28  # of a file; the largest tokenizers have 35 MB


@dataclasses.dataclass(frozen=True, eq=False)
class TextTokenizer:
    """The tokenizer of a model directory; make one with `TextTokenizer.from_directory`.

    directory        where it was read from, for error messages
    tokenizer        tokenizer.json with the tokens that other files add, without truncation and padding
    special_tokens   strings such as `bos_token`, by the name that chat templates use
    eos_ids          ids that end a generation
    bos_id           id that starts a text, if the model has one
    template         source of the chat template, if the model has one
    content          bytes of tokenizer.json
    added            flags of the tokens that other files add or change, by id, as `added_tokens_decoder` has them
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
        """The first 16 hex digits of the SHA-256 of tokenizer.json, and of the tokens that are added to it."""
        digest = hashlib.sha256(self.content)
        if self.added:
            digest.update(json.dumps(self.added, sort_keys=True).encode())
        return digest.hexdigest()[:16]

    @classmethod
    def from_directory(cls, directory: hf_config.Path) -> "TextTokenizer":
        """Reads tokenizer.json, and what the other files add; CheckpointError if one is missing or corrupt."""
        root = hf_config.model_directory(directory)
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
    def saving(self, directory: hf_config.Path) -> Iterator[None]:
        """Writes what `from_directory` reads, and transformers too: beside what is there, which it replaces at the end.
        """
        root = pathlib.Path(directory)
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        if self.added:
            settings["added_tokens_decoder"] = self.added
        if self.template is not None:
            settings["chat_template"] = self.template
        with _files.replacing(root / TOKENIZER) as tokenizer, _files.replacing(root / SETTINGS) as beside:
            tokenizer.write_bytes(self.content)  # as it is: the model is known by it, too
            beside.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            yield
        for name in (TEMPLATE, SPECIAL_TOKENS, ADDED_TOKENS):  # of a model that was there: they would be read
            (root / name).unlink(missing_ok=True)

    @functools.cached_property
    def codec(self) -> TextCodec:
        """Encodes and decodes texts in pieces, without the special tokens around a whole one."""
        return TextCodec(self.tokenizer, str(self.directory))

    @functools.cached_property
    def special_ids(self) -> dict[str, int]:
        """Ids of the special tokens, which `decode` leaves out, by their texts."""
        return {text: i for i, text in self.codec.special.items()}

    @functools.cached_property
    def start_ids(self) -> tuple[int, ...]:
        """Ids that every text begins with. Some tokenizers end each text, too, and a prompt goes on."""
        with tokenizer_errors(f"{self.directory}: the tokenizer cannot encode a text"):
            made = self.tokenizer.encode("a")
        return tuple(made.ids[: made.special_tokens_mask.index(0)] if 0 in made.special_tokens_mask else made.ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text that begins here, with `start_ids` before it unless it begins with them.

        Leave them out for text from `apply_chat_template`, which has those that the model wants. Raises PromptError for
        text with half a character of UTF-16 in it, CheckpointError where the tokenizer fails.
        """
        ids, start = self.codec.encode(text), list(self.start_ids)
        return ids if not add_special_tokens or ids[: len(start)] == start else start + ids

    def encode_continuation(self, text: str, before: Sequence[int] = ()) -> list[int]:
        """Returns the token ids of a text that goes on from another one (`TextCodec.encode_continuation`)."""
        return self.codec.encode_continuation(text, before)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` without special tokens."""
        return self.codec.decode(ids)

    def decode_continuation(self, ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Returns the text that `ids` add to what stands before them (`TextCodec.decode_continuation`)."""
        return self.codec.decode_continuation(ids, before)

    @functools.cached_property
    def closing_ids(self) -> tuple[int, ...]:
        """The special token that the chat template puts right behind an answer; () where it puts none."""
        answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\x00"}]
        try:
            text = self.apply_chat_template(answered, add_generation_prompt=False) if self.template else ""
        except (CheckpointError, PromptError):  # of a template that takes no such conversation
            return ()
        behind = self.encode(text.rpartition("\x00")[2], add_special_tokens=False)[:1]
        return tuple(one for one in behind if one in self.special_ids.values())

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model was taught to see it; each message has a role and a content.

        Raises CheckpointError if the model has no template or a broken one, or one that takes more time, memory or text
        than it may (`kvjax.models.chat_template`), and PromptError if the template refuses the messages.
        """
        if self.template is None:
            raise CheckpointError(
                f"{self.directory}: no chat template in {SETTINGS} or {TEMPLATE}; encode plain text for a base model"
            )
        # Templates test `tools` and `documents` for none, which an undefined name is not.
        names = {"messages": list(messages), "add_generation_prompt": add_generation_prompt, "tools": None,
                 "documents": None, **self.special_tokens}
        return chat_template.render(self.template, names, str(self.directory))


def _read_tokenizer(path: pathlib.Path) -> bytes:
    try:
        return _files.read_regular(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); only fast tokenizers are supported") from error


def _parse_tokenizer(path: pathlib.Path, content: bytes) -> Tokenizer:
    with tokenizer_errors(f"{path}: not a tokenizer"):
        tokenizer = Tokenizer.from_buffer(content)
    # Some files carry the settings of a training run, which would cut or pad every text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _eos_ids(root: pathlib.Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    """The ids of both model files, which chat models extend with their end of turn, and the tokenizer's own."""
    paths = (root / hf_config.GENERATION, root / hf_config.CONFIG)
    stated = [i for path in paths for i in hf_config.token_ids("eos_token_id", (path, read_optional_json(path)))]
    own = _id_of(tokenizer, special.get("eos_token"))
    return tuple(dict.fromkeys(stated if own is None else [*stated, own]))


def _id_of(tokenizer: Tokenizer, token: str | None) -> int | None:
    return None if token is None else tokenizer.token_to_id(token)


def _template(root: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    """The template's own file, else the one in the settings; of several named ones the default."""
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
