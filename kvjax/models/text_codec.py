"""Encoding and decoding of texts in pieces."""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from kvjax.errors import CheckpointError, KvjaxError, PromptError

PART_OF_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # text that part of a character decodes to
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Decoders that change no text of other tokens, but for parts of a character.
_LOCAL = ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip")
_UNKNOWN = "\U000f0000"  # a private-use character, in no vocabulary


@contextlib.contextmanager
def tokenizer_errors(problem: str) -> Iterator[None]:
    """Turns errors of the tokenizers library into CheckpointError with a message that begins with `problem`.

    They include panics of its Rust code, which are no Exceptions; a regular expression that gives up causes one.
    """
    try:
        yield
    except KvjaxError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise CheckpointError(f"{problem} ({error}); download the tokenizer's files again, or use another "
                                  "model") from error
        raise


class TextCodec:
    """Tokenizer for whole texts and for their continuations, without the special tokens around a text.

    Many tokenizers put a space before a text and remove one from decoded text: the normaliser Prepend, Metaspace,
    ByteLevel with `add_prefix_space`, the decoder Strip. Neither is right for a continuation.

    Every method raises CheckpointError if the tokenizer fails.
    """

    def __init__(self, tokenizer: Tokenizer, name: str):
        """Wraps a tokenizer; `name`, such as its directory, begins error messages."""
        self.tokenizer, self.name = tokenizer, name

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text that nothing precedes.

        Raises PromptError if the text contains half a surrogate pair, as files read with `surrogateescape` may.
        """
        return self._encoded(self.tokenizer, text).ids

    def encode_continuation(self, text: str, before: Sequence[int] = ()) -> list[int]:
        """Returns the token ids of a text that continues another one.

        Appended to the ids of the text before, they are the ids of the joint text if the tokenizer splits it there.

        Args:
          text: text to encode.
          before: ids of the text before, as far as they are known: some tokenizers put a space after a special token.

        Raises:
          PromptError: as in `encode`.
        """
        if before and before[-1] in self._added and before[-1] not in self._unknown:
            first, *ids = self.encode(self._added[before[-1]].content + text)
            if first == before[-1]:
                return ids
        encoding, unprefixed = self._encoded(self.tokenizer, text), self._unprefixed
        if unprefixed is None:
            return encoding.ids
        # Only the part before the first added token continues the text: the tokenizer splits there.
        places = (k for k, i in enumerate(encoding.ids) if i in self._added and not (k == 0 and i in self._spaced))
        first = next(places, len(encoding.ids))
        head = text if first == len(encoding.ids) else text[: encoding.offsets[first][0]]
        return [*self._encoded(unprefixed, head).ids, *encoding.ids[first:]]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens."""
        with tokenizer_errors(f"{self.name}: the tokenizer cannot decode these token ids"):
            return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_continuation(self, ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Returns the text, without special tokens, that ids add to the text before them.

        A character that the first of `ids` complete belongs to the returned text.

        Args:
          ids: ids to decode.
          before: ids before them, as far as they are known.
        """
        tail = [*self._neutral, *before[self.character_start(before, len(before) - 1):]]
        known_text, joint_text = self.decode(tail), self.decode([*tail, *ids])
        while not joint_text.startswith(known_text):
            tail = tail[:-1]
            known_text = self.decode(tail)
        return joint_text[len(known_text):]

    def is_open(self, ids: Sequence[int]) -> bool:
        """Returns True if ids that follow may change the text of these: they end within a character, or with a byte,
        as some tokenizers decode neighbouring bytes together."""
        last = next((i for i in reversed(ids) if i not in self.special), None)
        return last in self._bytes or self.decode_continuation(ids).endswith(PART_OF_CHARACTER)

    def spell(self, ids: Sequence[int]) -> str:
        """Returns the text that ids add to another text, special tokens included."""
        runs = itertools.groupby(ids, self.special.__contains__)
        return "".join(
            "".join(self.special[i] for i in run) if apart else self.decode_continuation(list(run))
            for apart, run in runs
        )

    def completing(self, marks: Sequence[str], vocabulary: int) -> list[int]:
        """Returns the ids below `vocabulary` of all tokens that may complete one of the marks in a text, as they end it
        or have part of a character; all ids where the text of a token depends on the tokens around it."""
        texts = self._texts_after
        if texts is None:
            return list(range(vocabulary))
        ends = tuple({PART_OF_CHARACTER, *(mark[i:] for mark in marks for i in range(1, len(mark)))})
        within = (PART_OF_CHARACTER, *marks)
        return [
            i for i, text in enumerate(texts[:vocabulary])
            if text and (text.startswith(ends) or any(part in text for part in within))
        ]

    def character_start(self, ids: Sequence[int], at: int) -> int:
        """Returns the last index from 0 to `at` whose token begins with a whole character."""
        while at > 0 and self.decode([ids[at]]).startswith(PART_OF_CHARACTER):
            at -= 1
        return max(0, at)

    def _encoded(self, tokenizer: Tokenizer, text: str):
        try:
            text.encode()
        except UnicodeEncodeError as cause:
            raise PromptError(f"character {cause.start} of the text is half a surrogate pair ({cause.reason}); read "
                              "the file with errors='replace'") from cause
        with tokenizer_errors(f"{self.name}: the tokenizer cannot encode the text"):
            return tokenizer.encode(text, add_special_tokens=False)

    @functools.cached_property
    def special(self) -> dict[int, str]:
        """Texts of the special tokens, which `decode` leaves out, by their ids."""
        return {i: token.content for i, token in self._added.items() if token.special}

    @functools.cached_property
    def _added(self) -> dict[int, AddedToken]:
        """Added tokens by id; a text is split at them before anything else."""
        return self.tokenizer.get_added_tokens_decoder()

    @functools.cached_property
    def _bytes(self) -> frozenset[int]:
        """Ids of tokens that are a single byte, such as `<0x0A>`."""
        known = self.tokenizer.get_vocab(with_added_tokens=False).items()
        return frozenset(i for text, i in known if _BYTE.fullmatch(text))

    @functools.cached_property
    def _spaced(self) -> frozenset[int]:
        """Ids of added tokens that match only with the space that the normaliser puts before a text."""
        normaliser = _json(self.tokenizer.normalizer)
        candidates = () if _without_prefix(normaliser) == normaliser else self._added.items()
        return frozenset(i for i, token in candidates if token.normalized)

    @functools.cached_property
    def _unknown(self) -> frozenset[int]:
        """Ids for characters not in the vocabulary: mostly an added token, but one at which no text is split."""
        with contextlib.suppress(Exception):  # raised if the vocabulary has no such token
            return frozenset(token.id for token in self.tokenizer.model.tokenize(_UNKNOWN))
        return frozenset()

    @functools.cached_property
    def _unprefixed(self) -> Tokenizer | None:
        """Copy of the tokenizer without added tokens and without a prefix before a text; None if it puts no prefix."""
        parts = {"normalizer": _json(self.tokenizer.normalizer), "pre_tokenizer": _json(self.tokenizer.pre_tokenizer)}
        bare = {name: _without_prefix(part) for name, part in parts.items()}
        if bare == parts:
            return None
        with tokenizer_errors(f"{self.name}: the tokenizer cannot be copied without its prefix"):
            copy = Tokenizer.from_str(json.dumps({
                "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None,
                "decoder": None, "model": {"type": "BPE", "vocab": {}, "merges": []}, **bare,
            }))
            copy.model = self.tokenizer.model
        return copy

    @functools.cached_property
    def _texts_after(self) -> list[str] | None:
        """Text that each id adds to another text, special tokens included; None if it depends on the ids around it."""
        decoder = _json(self.tokenizer.decoder)
        parts = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        if not self._neutral or any(part["type"] not in _LOCAL or part.get("stop") for part in parts):
            return None
        before, count = self.decode(self._neutral), max(self.tokenizer.get_vocab().values()) + 1
        with tokenizer_errors(f"{self.name}: the tokenizer cannot decode its tokens"):
            texts = self.tokenizer.decode_batch([[*self._neutral, i] for i in range(count)], skip_special_tokens=True)
        added = [text[len(before):] if text.startswith(before) else PART_OF_CHARACTER for text in texts]
        return [self.special.get(i, PART_OF_CHARACTER if i in self._bytes else text) for i, text in enumerate(added)]

    @functools.cached_property
    def _neutral(self) -> tuple[int, ...]:
        """One token of letters or digits, if there is one, after which decoders remove no space."""
        ids = sorted(self.tokenizer.get_vocab(with_added_tokens=False).values())
        for i in ids:
            if i not in self._bytes and i not in self._added and self.decode([i]).strip().isalnum():
                return (i,)
        return ()


def _json(part) -> dict[str, Any] | None:
    """Returns a part of a tokenizer as in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a normaliser or pre-tokeniser changed to put no prefix before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    match part:
        case {"type": "Metaspace"}:
            return {**part, "prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return {**part, "add_prefix_space": False}
        case {"type": "Sequence", "normalizers": parts}:
            return {**part, "normalizers": [bare for inner in parts if (bare := _without_prefix(inner)) is not None]}
        case {"type": "Sequence", "pretokenizers": [first, *rest]}:
            # Later ones see single words, and mark the beginning of each with their prefix.
            return {**part, "pretokenizers": [_without_prefix(first), *rest]}
    return part
