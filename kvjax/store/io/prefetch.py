"""Which reads of a branch were begun before anybody asked, and what became of the guesses."""

from collections.abc import Callable

import numpy as np

from kvjax.store.interface import Tally
from kvjax.store.io.aio import Guess
from kvjax.store.io.fetch import Fetch
from kvjax.store.io.file import Where
from kvjax.store.io.reader import Reader

Copy = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (targets, out) -> positions of damaged blocks
Note = Callable[[str, int, float], None]  # (kind, layer, seconds) of an event


class Reads:
    """The reads of one branch: at most one guess per layer is on its way.

    A prefetched block is used only if it still lies in the same extent and has the same checksum as when it was
    asked for; everything else is read again. So a prefetch can be wrong, late or broken, and never changes a result.

    Attributes:
      guesses: what is on its way, by layer: a `Guess` was begun by `native.guess`, and is landed by who takes it out; a
        Fetch is for `fetch`.
    """

    def __init__(self, reader: Reader, tally: Tally):
        self._reader = reader
        self._tally = tally
        self.guesses: dict[int, Fetch | Guess] = {}

    def begin(self, layer: int, extents: np.ndarray, sums: np.ndarray, where: Where) -> None:
        """Starts to read extents[n], ascending, in place of the layer's earlier guess."""
        self.drop(layer)
        if extents.size:
            guess = self._reader.guess(extents, sums, where)
            if guess is not None:
                self.keep(layer, guess, extents.size)

    def keep(self, layer: int, guess: Fetch | Guess, blocks: int) -> None:
        """Reads of so many blocks were begun, where the layer has no guess."""
        self.guesses[layer] = guess
        self._tally.add(prefetched=blocks)

    def forget(self) -> None:
        """Nobody wants any of the guesses any more."""
        for layer in list(self.guesses):
            self.drop(layer)

    def drop(self, layer: int) -> None:
        """Nobody wants the layer's guess any more."""
        guess = self.guesses.pop(layer, None)
        if guess is not None:
            guess.drop()

    def fetch(self, layer: int, extents: np.ndarray, sums: np.ndarray, where: Where, note: Note) -> Copy:
        """Starts to read those of extents[n], ascending, that were not guessed. The function returned waits for all,
        copies them, and gives int64 positions of damaged ones; it raises ShortRead or ReadFailed."""
        guess = self.guesses.pop(layer, None)
        if isinstance(guess, Guess):  # an unusual read: it is begun anew
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
        """Waits for the chosen positions; returns those that are damaged."""
        if fetch is None:
            return chosen
        suspects = fetch.copy(targets[chosen], out)
        self._count(layer, fetch, note)
        return chosen[suspects]

    def _count(self, layer: int, fetch: Fetch, note: Note) -> None:
        """Notes the events of a finished fetch, and books it."""
        began, ended, waited = fetch.times
        note("request", layer, began)
        note("landed", layer, ended)
        self._tally.add(reads=fetch.requests, blocks_read=fetch.sums.size, bytes_read=fetch.size,
                        io_seconds=ended - began, wait_seconds=waited)


def _find(guess: Fetch, extents: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Position of each block in a guess, -1 where it is not there or taken by the block before: int64[n]."""
    place = np.minimum(guess.extents.searchsorted(extents), guess.extents.size - 1)
    found = (guess.extents[place] == extents) & (guess.sums[place] == sums)
    found[1:] &= place[1:] != place[:-1]
    return np.where(found, place, -1)


def _copy_guessed(guess: Fetch, place: np.ndarray, targets: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Copies blocks at place[n] of a guess (-1: none) to out[targets]; returns int64 positions of those that did not
    arrive sound and are to be read again. Raises ReadFailed when the device hangs."""
    wanted = place >= 0
    goals = np.full(guess.extents.size, -1)
    goals[place[wanted]] = targets[wanted]
    lost, _ = guess.collect(goals, out)  # whoever reads again finds out whether an error is still there
    arrived = np.ones(guess.extents.size, bool)
    arrived[lost] = False
    return (wanted & ~arrived[place]).nonzero()[0]
