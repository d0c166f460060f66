"""Text to token ids and back, where a text is read and written in pieces."""

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from kvjax.errors import CheckpointError, KvjaxError, PromptError

_HALF = "\N{REPLACEMENT CHARACTER}"  # what a part of a character decodes to
_UNKNOWN = "\U000f0000"  # a character for private use


@contextlib.contextmanager
def tokenizer_errors(problem: str) -> Iterator[None]:
    """Raises CheckpointError, which begins with `problem`, in place of what the tokenizers library raises.

    That may be a panic of its Rust code, which is no Exception: of a regular expression that gives up, for one.
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
    """A tokenizer for whole texts and for what continues them; never with the special tokens it puts around a text.

    Many tokenizers put a space before a text, and take one away from the text that ids decode to: the normaliser
    Prepend, Metaspace, ByteLevel with `add_prefix_space`, the decoder Strip. Neither is right for a continuation.

    Every method raises CheckpointError where the tokenizer fails.
    """

    def __init__(self, tokenizer: Tokenizer, name: str):
        """`name` begins error messages, such as the directory that the tokenizer is from."""
        self.tokenizer, self.name = tokenizer, name

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text that begins here.

        Raises PromptError for text with half a character of UTF-16 in it, as of a file read with `surrogateescape`.
        """
        return self._encoded(self.tokenizer, text).ids

    def encode_continuation(self, text: str, before: Sequence[int] = ()) -> list[int]:
        """Returns the token ids of a text that goes on from another one; raises as `encode` does.

        With the ids of the text before it they are the ids of both in one, where the tokenizer cuts between the two.
        `before` are those ids, as far as they are known: some tokenizers put a space behind a special token, too.
        """
        if before and before[-1] in self._added and before[-1] not in self._unknown:
            first, *ids = self.encode(self._added[before[-1]].content + text)
            if first == before[-1]:
                return ids
        encoding, unprefixed = self._encoded(self.tokenizer, text), self._unprefixed
        if unprefixed is None:
            return encoding.ids
        # Only what stands before the first added token continues the text: the tokenizer itself cuts there.
        found = (k for k, i in enumerate(encoding.ids) if i in self._added and not (k == 0 and i in self._spaced))
        first = next(found, len(encoding.ids))
        head = text if first == len(encoding.ids) else text[: encoding.offsets[first][0]]
        return [*self._encoded(unprefixed, head).ids, *encoding.ids[first:]]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens."""
        with tokenizer_errors(f"{self.name}: the tokenizer cannot decode these token ids"):
            return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_continuation(self, ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Returns the text, without special tokens, that ids add to what stands before them.

        `before` are the ids that do, as far as they are known. A character that the first of `ids` complete is theirs.
        """
        tail = [*self._neutral, *before[self.character_start(before, len(before) - 1):]]
        given, both = self.decode(tail), self.decode([*tail, *ids])
        while not both.startswith(given):
            tail = tail[:-1]
            given = self.decode(tail)
        return both[len(given):]

    def spell(self, ids: Sequence[int]) -> str:
        """Returns the text that ids add to another one, special tokens included."""
        runs = itertools.groupby(ids, self.special.__contains__)
        return "".join(
            "".join(self.special[i] for i in run) if apart else self.decode_continuation(list(run))
            for apart, run in runs
        )

    def character_start(self, ids: Sequence[int], at: int) -> int:
        """Returns the last place from 0 to `at` where a token begins with a whole character."""
        while at > 0 and self.decode([ids[at]]).startswith(_HALF):
            at -= 1
        return max(0, at)

    def _encoded(self, tokenizer: Tokenizer, text: str):
        try:
            text.encode()
        except UnicodeEncodeError as cause:
            raise PromptError(f"character {cause.start} of the text is no character ({cause.reason}); read the file "
                              "with errors='replace'") from cause
        with tokenizer_errors(f"{self.name}: the tokenizer cannot encode the text"):
            return tokenizer.encode(text, add_special_tokens=False)

    @functools.cached_property
    def special(self) -> dict[int, str]:
        """Texts of the special tokens, which `decode` leaves out, by their ids."""
        return {i: token.content for i, token in self._added.items() if token.special}

    @functools.cached_property
    def _added(self) -> dict[int, AddedToken]:
        """The added tokens, at which a text is cut before anything else is done to it."""
        return self.tokenizer.get_added_tokens_decoder()

    @functools.cached_property
    def _spaced(self) -> frozenset[int]:
        """Added tokens that are found behind the space only that the normaliser puts before a text, as before them."""
        normaliser = _json(self.tokenizer.normalizer)
        found = () if _without_prefix(normaliser) == normaliser else self._added.items()
        return frozenset(i for i, token in found if token.normalized)

    @functools.cached_property
    def _unknown(self) -> frozenset[int]:
        """Ids that stand for characters that the vocabulary lacks: an added token, mostly, at which no text is cut."""
        with contextlib.suppress(Exception):  # a vocabulary without such a token has none
            return frozenset(token.id for token in self.tokenizer.model.tokenize(_UNKNOWN))
        return frozenset()

    @functools.cached_property
    def _unprefixed(self) -> Tokenizer | None:
        """The tokenizer without added tokens, and with nothing that it puts before a text; None if it puts nothing."""
        parts = {"normalizer": _json(self.tokenizer.normalizer), "pre_tokenizer": _json(self.tokenizer.pre_tokenizer)}
        bare = {name: _without_prefix(part) for name, part in parts.items()}
        if bare == parts:
            return None
        with tokenizer_errors(f"{self.name}: the tokenizer cannot be taken apart"):
            copy = Tokenizer.from_str(json.dumps({
                "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None,
                "decoder": None, "model": {"type": "BPE", "vocab": {}, "merges": []}, **bare,
            }))
            copy.model = self.tokenizer.model
        return copy

    @functools.cached_property
    def _neutral(self) -> tuple[int, ...]:
        """A token of letters or digits, if there is one: behind it decoders take no space away."""
        by_id = sorted(self.tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda pair: pair[1])
        for text, i in by_id:
            byte = text.startswith("<0x")  # which is decoded together with other bytes
            if not byte and i not in self._added and self.decode([i]).strip().isalnum():
                return (i,)
        return ()


def _json(part) -> dict[str, Any] | None:
    """The part of a tokenizer as tokenizer.json has it."""
    return None if part is None else json.loads(part.__getstate__())


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normaliser or pre-tokeniser that puts nothing before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    match part:
        case {"type": "Metaspace"}:
            return {**part, "prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return {**part, "add_prefix_space": False}
        case {"type": "Sequence", "normalizers": parts}:
            return {**part, "normalizers": [bare for one in parts if (bare := _without_prefix(one)) is not None]}
        case {"type": "Sequence", "pretokenizers": [first, *rest]}:
            # Later ones see words, and mark with their prefix where one begins.
            return {**part, "pretokenizers": [_without_prefix(first), *rest]}
    return part
