"""What a long call shows, and how the time to compile is told apart."""

import io
import logging
import threading
import time
from contextlib import redirect_stderr

import jax
import jax.numpy as jnp
import pytest

from kvjax.inference import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal, which is standard error within `redirect_stderr`."""
    monkeypatch.setattr(progress, "_DELAY", 0.01)
    monkeypatch.setattr(progress, "_REFRESH", 0.01)
    return Terminal()


def test_a_terminal_shows_a_bar_that_goes_away(terminal):
    with redirect_stderr(terminal), progress.shown("reading", 40) as bar:
        for _ in range(40):
            bar.update()
            time.sleep(0.005)
    assert "reading" in terminal.getvalue() and "/40" in terminal.getvalue()
    assert terminal.getvalue().rstrip(" ").endswith("\r"), "the line is free again"


def test_a_short_call_shows_nothing(terminal, monkeypatch):
    monkeypatch.setattr(progress, "_DELAY", 30)
    with redirect_stderr(terminal), progress.shown("reading", 40) as bar:
        bar.update()
    assert terminal.getvalue() == ""


def test_compiling_is_said_while_it_lasts(terminal):
    with redirect_stderr(terminal), progress.shown("answering"):
        progress.CLOCK.compiling.add(-1)
        time.sleep(0.2)
        progress.CLOCK.compiling.discard(-1)
    assert "compiling" in terminal.getvalue()


def test_elsewhere_a_long_call_is_one_log_line(monkeypatch, caplog):
    monkeypatch.setattr(progress, "_LONG", 0.0)
    with redirect_stderr(io.StringIO()), caplog.at_level(logging.INFO, "kvjax"), progress.shown("reading", 3) as bar:
        bar.update(3)
    (line,) = caplog.messages
    assert line.startswith("reading: 3 tokens in ") and line.endswith(" s to compile")


def test_a_bar_ends_with_an_error(terminal):
    before = threading.active_count()
    with redirect_stderr(terminal), pytest.raises(ZeroDivisionError), progress.shown("reading", 3):
        time.sleep(0.05)
        raise ZeroDivisionError
    assert threading.active_count() == before


def test_the_clock_counts_what_jax_compiles_and_only_that():
    x = jnp.ones((7, 7))
    program = jax.jit(lambda x: jnp.tanh(x @ jnp.cos(x)) * 3 - 11)
    begin, before = time.perf_counter(), progress.CLOCK.seconds
    jax.block_until_ready(program(x))
    whole, compiling = time.perf_counter() - begin, progress.CLOCK.seconds - before
    assert 0 < compiling <= whole
    before = progress.CLOCK.seconds
    jax.block_until_ready(program(x))
    assert progress.CLOCK.seconds == before
    jax.eval_shape(lambda x: x * 2.5, x)  # traces, and compiles nothing
    assert threading.get_ident() not in progress.CLOCK.compiling


def test_a_program_within_another_is_counted_once():
    clock = progress.CompileClock()
    event = "/jax/core/compile/jaxpr_trace_duration"
    clock._heard(event, 1.0)  # within the next one
    clock._heard(event, 3.0)
    assert clock.seconds == pytest.approx(3.0, abs=0.1)
    clock._heard("/jax/other", 5.0)
    assert clock.seconds == pytest.approx(3.0, abs=0.1)
