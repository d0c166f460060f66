"""Prefetches of a branch: which reads were begun before they were requested, and which of them were used."""

from collections.abc import Callable

import numpy as np

from kvjax.store.io.aio import Guess
from kvjax.store.io.fetch import Fetch
from kvjax.store.io.file import Where
from kvjax.store.io.reader import Reader
from kvjax.store.stats import Tally

Copy = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (targets, out) -> positions of blocks that do not match
Note = Callable[[str, int, float], None]  # (kind, layer, seconds) of an event


class Reads:
    """The reads of one branch, with at most one guess (speculative read) in flight per layer.

    A prefetched block is used only if it still has the extent and the checksum of the time it was requested; everything
    else is read again. So a prefetch can be wrong, late or broken, and never changes a result.

    Attributes:
      guesses: the guess of each layer: a `Guess` was begun by `native.guess`, and whoever removes it lands or drops it;
        a Fetch is for `fetch`.
    """

    def __init__(self, reader: Reader, tally: Tally):
        self._reader = reader
        self._tally = tally
        self.guesses: dict[int, Fetch | Guess] = {}

    def begin(self, layer: int, extents: np.ndarray, sums: np.ndarray, where: Where) -> None:
        """Begins to read extents[n], ascending, with checksums sums[n], replacing the layer's earlier guess."""
        self.drop(layer)
        if extents.size:
            guess = self._reader.guess(extents, sums, where)
            if guess is not None:
                self.keep(layer, guess, extents.size)

    def keep(self, layer: int, guess: Fetch | Guess, blocks: int) -> None:
        """Keeps a guess of this many blocks for a layer that has none."""
        self.guesses[layer] = guess
        self._tally.add(prefetched=blocks)

    def forget(self) -> None:
        """Drops the guesses of all layers."""
        for layer in list(self.guesses):
            self.drop(layer)

    def drop(self, layer: int) -> None:
        """Drops the layer's guess, if there is one."""
        guess = self.guesses.pop(layer, None)
        if guess is not None:
            guess.drop()

    def fetch(self, layer: int, extents: np.ndarray, sums: np.ndarray, where: Where, note: Note) -> Copy:
        """Begins to read the blocks that were not guessed.

        Args:
          layer: index of the layer.
          extents: int32[n] extents, ascending.
          sums: uint64[n] their checksums.
          where: names the contents at a file offset, for messages.
          note: records an event.

        Returns:
          A function that waits for all blocks, copies them, and returns int64 positions of those that do not match
          their checksums; it raises ShortRead or ReadFailed.
        """
        guess = self.guesses.pop(layer, None)
        if isinstance(guess, Guess):  # only `native.fetch` can land it, so everything is read again
            guess.drop()
        elif guess is not None:
            return self._fetch_rest(layer, guess, extents, sums, where, note)
        fetch = self._reader.start(extents, sums, where)

        def copy(targets: np.ndarray, out: np.ndarray) -> np.ndarray:
            suspects = fetch.copy(targets, out)
            self._count(layer, fetch, note)
            return suspects

        return copy

    def _fetch_rest(self, layer: int, guess: Fetch, extents, sums, where: Where, note: Note) -> Copy:
        place = _find(guess, extents, sums)
        missing = (place < 0).nonzero()[0]
        late = self._start(extents, sums, missing, where)

        def copy(targets: np.ndarray, out: np.ndarray) -> np.ndarray:
            again = _copy_guessed(guess, place, targets, out)
            self._tally.add(prefetch_used=extents.size - missing.size, mispredicted=missing.size)
            self._count(layer, guess, note)
            second = self._start(extents, sums, again, where)
            return np.concatenate([self._collect(layer, second, again, targets, out, note),
                                   self._collect(layer, late, missing, targets, out, note)])

        return copy

    def _start(self, extents, sums, chosen: np.ndarray, where: Where) -> Fetch | None:
        return self._reader.start(extents[chosen], sums[chosen], where) if chosen.size else None

    def _collect(self, layer: int, fetch: Fetch | None, chosen: np.ndarray, targets, out, note: Note) -> np.ndarray:
        """Waits for the blocks at the chosen positions; returns the positions of those that do not match."""
        if fetch is None:
            return chosen
        suspects = fetch.copy(targets[chosen], out)
        self._count(layer, fetch, note)
        return chosen[suspects]

    def _count(self, layer: int, fetch: Fetch, note: Note) -> None:
        """Records the events and totals of a finished fetch."""
        began, ended, waited = fetch.times
        note("request", layer, began)
        note("landed", layer, ended)
        self._tally.add(reads=fetch.requests, blocks_read=fetch.sums.size, bytes_read=fetch.size,
                        io_seconds=ended - began, wait_seconds=waited)


def _find(guess: Fetch, extents: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Returns the position of each block in a guess, int64[n]; -1 where it is absent, or the previous block has it."""
    place = np.minimum(guess.extents.searchsorted(extents), guess.extents.size - 1)
    present = (guess.extents[place] == extents) & (guess.sums[place] == sums)
    present[1:] &= place[1:] != place[:-1]
    return np.where(present, place, -1)


def _copy_guessed(guess: Fetch, place: np.ndarray, targets: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Copies blocks at place[n] of a guess (-1: none) to out[targets]. Returns int64 positions of those that did not
    arrive intact and have to be read again; raises ReadFailed when the device hangs."""
    wanted = place >= 0
    goals = np.full(guess.extents.size, -1)
    goals[place[wanted]] = targets[wanted]
    lost, _ = guess.collect(goals, out)  # reading again reports the error if it persists
    arrived = np.ones(guess.extents.size, bool)
    arrived[lost] = False
    return (wanted & ~arrived[place]).nonzero()[0]
