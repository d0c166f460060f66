"""Streams: answers as pieces of text, while they are generated."""

import dataclasses
from collections.abc import Generator

from kvjax.inference.answers import Answer, Result
from kvjax.inference.stops import Stops


@dataclasses.dataclass(frozen=True)
class Piece:
    """The next piece of an answer; `str(piece)` is its text.

    Attributes:
      text: text since the piece before, which ends with a whole character. For a batch, a list with the text of each
        sequence, of which some may be empty.
      result: the whole answer, why it ended, and the cache after it; None in all pieces but the last.
    """

    text: str | list[str]
    result: Result | None = None

    def __str__(self) -> str:
        return self.text if isinstance(self.text, str) else "\n".join(self.text)


class Stream:
    """An iterator over the pieces of an answer.

    It works on a copy of the cache. Leaving the context, or `close`, drops the copy if the answer did not end;
    afterwards the cache in `result` is the caller's to close.

    Attributes:
      result: the whole answer; None = it has not ended.
    """

    def __init__(self, pieces: Generator[Piece, None, None]):
        self._pieces = pieces
        self.result: Result | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        piece = next(self._pieces)
        self.result = piece.result
        return piece

    def close(self) -> None:
        """Ends the answer where it is. Closing twice is allowed."""
        self._pieces.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *raised) -> None:
        self.close()


class TextSoFar:
    """The text of one growing answer, of which a part is certain: whole characters that no `stop` will cut off."""

    def __init__(self, stops: Stops, before: list[int]):
        """Initialises the text.

        Args:
          stops: what ends the answer.
          before: token ids that the answer follows.
        """
        self.stops, self.before = stops, before
        self.told = ""  # text that `more` has returned
        self._done = 0  # tokens whose text is in it

    def more(self, answer: Answer) -> str:
        """Returns the text that became certain since the last call."""
        fresh = answer.tokens[self._done :]
        if not fresh or self.stops.is_open(fresh):
            return ""
        text = self.stops.text(fresh, [*self.before, *answer.tokens[: self._done]])
        if text:  # tokens without text wait for others, as bytes on both sides of them are decoded together
            self._done = len(answer.tokens)
        self.told += text
        return text

    def rest(self, whole: str) -> str:
        """Returns what is left of the text of the whole answer."""
        return whole[len(self.told) :]
