"""Texts that end an answer."""

import dataclasses
import functools
from collections.abc import Sequence

from kvjax.models.tokenizer import TextTokenizer

_SPARE = 16  # tokens without text that may occur among those of a mark


@dataclasses.dataclass(frozen=True)
class Stops:
    """The marks that end an answer, of three kinds.

    A mark that is a special token ends the answer before it, as an end-of-text token does. A mark that contains special
    tokens and other text ends the answer once it is complete, and is cut off. Any other mark is plain text: the answer
    ends after the token that completes the mark, and keeps both.
    """

    tokenizer: TextTokenizer | None  # may be None if there are no marks
    marks: tuple[str, ...]

    @functools.cached_property
    def ids(self) -> tuple[int, ...]:
        """Ids of the marks that are special tokens."""
        return tuple(self._special[mark] for mark in self.marks if mark in self._special)

    def complete(self, tokens: Sequence[int]) -> bool:
        """Returns True if the last token of an answer completes one of the marks in its text.

        Args:
          tokens: token ids of the answer, of which the text before the last contains no mark.
        """
        if self.tokenizer is None or not self.marks:
            return False
        most = max(len(mark.encode()) for mark in self.marks) + _SPARE
        last = tokens[self.tokenizer.codec.character_start(tokens, len(tokens) - most):]
        plain, spelled = (
            self.tokenizer.decode_continuation(last) if self._plain else "",
            self.tokenizer.codec.spell(last) if self._mixed else "",
        )
        return any(mark in plain for mark in self._plain) or any(mark in spelled for mark in self._mixed)

    def completing(self, vocabulary: int) -> list[int]:
        """Returns the token ids below `vocabulary` after which `complete` may be True."""
        if self.tokenizer is None or not self._texts:
            return []
        return self.tokenizer.codec.completing([*self._plain, *self._mixed], vocabulary)

    def cut(self, tokens: list[int], before: Sequence[int]) -> tuple[list[int], str]:
        """Cuts an answer before a mark with special tokens, if it contains one.

        Args:
          tokens: token ids of the answer.
          before: token ids that the answer follows.

        Returns:
          (Token ids, text). If the mark begins inside a token, only that part of its text is kept, not the token.
        """
        if self.tokenizer is None:
            return tokens, ""
        text = self.tokenizer.codec.spell(tokens) if self._mixed else ""
        end = min((text.find(mark) for mark in self._mixed if mark in text), default=None)
        if end is None:
            return tokens, self.text(tokens, before)
        kept = tokens
        while len(text) > end:
            kept, text = kept[:-1], self.tokenizer.codec.spell(kept[:-1])
        rest = self.tokenizer.codec.spell(tokens)[len(text): end]
        return kept, self.tokenizer.decode_continuation(kept, before) + rest

    def text(self, tokens: Sequence[int], before: Sequence[int]) -> str:
        """Returns the text of a part of an answer, given the token ids before it; "" without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode_continuation(tokens, before)

    def is_open(self, tokens: Sequence[int]) -> bool:
        """Returns True if tokens that follow may change the text of these, or cut off a part of it."""
        return self.tokenizer is not None and (self.may_cut(tokens) or self.tokenizer.codec.is_open(tokens))

    def may_cut(self, tokens: Sequence[int]) -> bool:
        """Returns True if the end of these tokens may be the beginning of a mark that `cut` would cut off."""
        if self.tokenizer is None or not self._mixed:
            return False
        text = self.tokenizer.codec.spell(tokens)
        return any(text.endswith(mark[:n]) for mark in self._mixed for n in range(1, len(mark) + 1))

    @functools.cached_property
    def _special(self) -> dict[str, int]:
        return self.tokenizer.special_ids if self.tokenizer else {}

    @functools.cached_property
    def _texts(self) -> list[str]:
        return [mark for mark in self.marks if mark not in self._special]

    @functools.cached_property
    def _plain(self) -> list[str]:
        return [mark for mark in self._texts if not any(special in mark for special in self._special)]

    @functools.cached_property
    def _mixed(self) -> list[str]:
        """Marks that contain special tokens, and as the tokenizer writes them: some put spaces after special tokens."""
        marks = [mark for mark in self._texts if mark not in self._plain]
        return [*marks, *filter(None, map(self._written, marks))]

    def _written(self, mark: str) -> str:
        assert self.tokenizer is not None, "there are no marks without a tokenizer"
        return self.tokenizer.codec.spell(self.tokenizer.encode_continuation(mark))
