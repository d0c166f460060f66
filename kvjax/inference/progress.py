"""What a long call is doing: a bar on a terminal or in a notebook, one log line elsewhere, and the time to compile.

`TQDM_DISABLE=1` turns the bars off.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

import jax
from tqdm.auto import tqdm

_log = logging.getLogger("kvjax")
_DELAY = 0.8  # seconds before a bar is shown; shorter calls show none
_REFRESH = 0.5
_LONG = 2.0  # seconds after which a call is logged
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"


class CompileClock:
    """Measures the time of this process in which a thread traces, lowers or compiles programs."""

    def __init__(self):
        self._spans: list[tuple[float, float]] = []  # disjoint, of one thread each, in order of their ends
        self._lock = threading.Lock()
        self._total = 0.0
        self.compiling: set[int] = set()  # threads that have lowered a program and are compiling it
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        now = time.perf_counter()
        with self._lock:
            # A program may be traced while another is: the longer time includes the shorter.
            while self._spans and self._spans[-1][0] >= now - seconds:
                begin, end = self._spans.pop()
                self._total -= end - begin
            self._spans = [*self._spans[-99:], (now - seconds, now)]
            self._total += seconds
        thread = threading.get_ident()
        if event == _LOWERED:
            self.compiling.add(thread)
        elif event == _COMPILED:
            self.compiling.discard(thread)

    @property
    def seconds(self) -> float:
        """Seconds so far; differences between two readings are meaningful."""
        return self._total


CLOCK = CompileClock()


class Bar:
    """The progress of one call; several threads may update it."""

    def __init__(self, what: str, total: int | None, unit: str):
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self._ended = threading.Event()

    def update(self, count: int = 1) -> None:
        """Counts units that are done."""
        self.done += count

    def serve(self) -> None:
        """Draws the bar until the call has ended; runs in a thread of its own."""
        if self._ended.wait(_DELAY):
            return
        with tqdm(desc=self.what, total=self.total, unit=f" {self.unit}", leave=False, delay=0) as bar:
            while True:
                bar.update(self.done - bar.n)
                bar.set_postfix_str("compiling" if CLOCK.compiling else "", refresh=True)
                if self._ended.wait(_REFRESH):
                    return

    def end(self) -> None:
        """Makes `serve` return."""
        self._ended.set()


@contextlib.contextmanager
def shown(what: str, total: int | None = None, unit: str = "tokens") -> Iterator[Bar]:
    """Shows what a call does, on stderr.

    Args:
      what: what is being done, such as "reading".
      total: units of the whole work; None = unknown.
      unit: what is counted.

    Yields:
      The bar to update.
    """
    bar, drawer = Bar(what, total, unit), None
    begin, compiled = time.perf_counter(), CLOCK.seconds
    if _is_watched():
        drawer = threading.Thread(target=bar.serve, daemon=True)
        drawer.start()
    try:
        yield bar
    finally:
        bar.end()
        if drawer is not None:
            drawer.join()
        seconds, compiled = time.perf_counter() - begin, CLOCK.seconds - compiled
        if drawer is None and seconds > _LONG:
            _log.info("%s: %s%s in %.1f s, of which %.1f s to compile", what, f"{bar.done:,} " if bar.done else "",
                      bar.unit if bar.done else "done", seconds, compiled)


def _is_watched() -> bool:
    """Returns whether somebody sees bars: stderr is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or tqdm.__module__ == "tqdm.notebook"
