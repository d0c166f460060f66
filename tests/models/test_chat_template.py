"""Chat templates that take more than they may, and the process that fills them in."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from kvjax.errors import CheckpointError, PromptError
from kvjax.models import chat_template

DOUBLED = (
    "{{% set ns = namespace(x={0}) %}}{{% for i in range(60) %}}{{% set ns.x = {1} %}}{{% endfor %}}{{{{ ns.x }}}}"
)
TIME, MEMORY, TEXT = "it took more than", "it takes too much memory", "it makes more than"


def render(template, **names):
    return chat_template.render(template, names, "DIR")


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)


@pytest.mark.parametrize(("template", "words"), [
    ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", TIME),
    ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", TIME),
    ("{{ lipsum(n=10**6) }}", TIME), ("{{ 7 ** (10 ** 8) }}", TIME), ("{{ 1.5 | round(10**9, 'ceil') }}", TIME),
    (DOUBLED.format("[1]", "[ns.x, ns.x]"), TIME),  # little memory, and 2**60 entries to write
    ("{{ 'a' * 10**10 }}", MEMORY), ("{{ ('a' * 10**6) | indent(10**10) }}", MEMORY),
    ("{{ 'a' | center(2 * 10**9) }}", MEMORY), ('{{ "%01999999999d" | format(1) }}', MEMORY),
    (DOUBLED.format("'a'", "ns.x ~ ns.x"), f"{TIME}|{MEMORY}"),
    (DOUBLED.format("'a'", "ns.x + ns.x"), f"{TIME}|{MEMORY}"),
    ("{% for i in range(100000) %}{{ 'a' * 100 }}{% endfor %}", TEXT), ("{{ 'a' * 2000000 }}", TEXT),
    ("{{ " + "(" * 10**5 + "1" + ")" * 10**5 + " }}", "maximum recursion"),
])
@pytest.mark.usefixtures("hurried")
def test_what_takes_too_much_is_ended(template, words):
    with pytest.raises(CheckpointError, match=f"^DIR: the chat template does not work: ({words})"):
        render(template)
    assert render("{{ a }}", a=1) == "1"


def test_long_messages_are_no_long_output():
    text = "lorem ipsum " * 200_000
    assert render("{% for m in messages %}{{ m.content | trim }}!{% endfor %}", messages=[{"content": text}]) == (
        text.strip() + "!")


@pytest.mark.parametrize("value", [object(), {(1, 2): 3}, b"bytes"])
def test_messages_that_are_of_no_type_of_json(value):
    with pytest.raises(PromptError, match="the messages are not of JSON's types"):
        render("{{ messages }}", messages=[{"content": value}])


def test_a_process_that_was_killed_is_started_anew():
    assert render("a") == "a"
    os.kill(chat_template._worker.pid, signal.SIGKILL)
    chat_template._worker.wait()
    assert render("b") == "b"


def test_a_process_that_is_killed_at_work_is_told(monkeypatch):
    assert render("a") == "a"
    worker = chat_template._worker
    monkeypatch.setattr(worker, "stdin", Killing(worker))
    with pytest.raises(CheckpointError, match="its process ended with -9"):
        render("b")
    assert render("c") == "c"


class Killing:
    """A pipe whose reader dies before it is written to."""

    def __init__(self, worker):
        self.worker, self.pipe = worker, worker.stdin

    def write(self, request):
        self.worker.kill()
        self.worker.wait()
        self.pipe.write(request)

    def __getattr__(self, name):
        return getattr(self.pipe, name)


def test_no_answer_is_anothers_after_ctrl_c(monkeypatch):
    """Given that Ctrl-C comes while the answer is waited for."""
    assert render("a") == "a"
    worker = chat_template._worker

    class Interrupted:
        def readline(self):
            raise KeyboardInterrupt

        close = worker.stdout.close

    monkeypatch.setattr(worker, "stdout", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        render("b")
    assert worker.poll() is not None and render("c") == "c"


def test_threads_have_each_their_own_answer():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: render("{{ i }}", i=i), range(100))) == [str(i) for i in range(100)]


def test_a_fork_has_a_process_of_its_own():
    assert render("a") == "a"
    code = (
        "import os, sys\n"
        "from kvjax.models import chat_template as c\n"
        "first = (c.render('a', {}, 'DIR'), c._worker.pid)\n"
        "if os.fork() == 0:\n"
        "    os._exit(0 if c.render('b', {}, 'DIR') == 'b' and c._worker.pid != first[1] else 1)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
        "assert c.render('c', {}, 'DIR') == 'c' and c._worker.pid == first[1]\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def is_running(process: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # what nobody has waited for yet


def test_no_process_is_left():
    code = "from kvjax.models import chat_template as c\nc.render('a', {}, 'DIR')\nprint(c._worker.pid)\n"
    for ending in ("", "import os; os._exit(0)"):
        done = subprocess.run([sys.executable, "-c", code + ending + "\n"], check=True, stdout=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while is_running(int(done.stdout)):  # it ends when its input does
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_process_that_cannot_be_started(monkeypatch):
    chat_template._end()
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(CheckpointError, match="DIR: no process for its chat template could be started"):
        render("a")
