"""Rendering of chat templates in a separate process, because a template is untrusted code.

Jinja's sandbox protects files and attributes, but does not stop nested loops, `'a' * 10**10` or a recursive parser, and
a thread in such a call cannot be stopped. A process can: it has `SECONDS` of processor time for each template, `MEMORY`
bytes of address space, and may answer with four times the characters of its request plus `_LEAST`. It is started at the
first use, serves all templates, and ends with this process.
"""

import atexit
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from kvjax.errors import CheckpointError, PromptError

SECONDS = 1.0
MEMORY = 1 << 30
_LEAST = 1 << 20
_WORKER = pathlib.Path(__file__).with_name("template_worker.py")

_lock = threading.Lock()
_worker: Any = None  # subprocess.Popen


def render(template: str, names: Mapping[str, Any], name: str) -> str:
    """Renders a Jinja template in the dialect of Hugging Face's chat templates.

    Args:
      template: source of the template.
      names: values of the template's variables, of JSON's types.
      name: beginning of the message of a CheckpointError.

    Raises:
      PromptError: a value is not of JSON's types, or the template refuses the messages.
      CheckpointError: the template is broken, or exceeds its limit of time, memory or text.
    """
    try:
        request = json.dumps({"template": template, "names": names, "seconds": SECONDS}, default=_mapping)
        request = f'{request[:-1]}, "characters": {4 * len(request) + _LEAST}}}\n'
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"the messages are not of JSON's types ({error}); give texts, numbers, lists and "
                          "dictionaries") from error
    with _lock:
        answer = _ask(request.encode(), name)
    if "refuses" in answer:
        raise PromptError(f"the chat template refuses these messages: {answer['refuses']}")
    if "broken" in answer:
        raise CheckpointError(f"{name}: the chat template does not work: {answer['broken']}; download it again or "
                              "write the prompt yourself")
    return answer["text"]


def _mapping(value: Any) -> dict:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} {value!r:.80}")


def _ask(request: bytes, name: str) -> dict[str, Any]:
    """Returns the worker's answer, or the reason why it ended."""
    worker = _started(name)
    try:
        worker.stdin.write(request)
        worker.stdin.flush()
        answer = worker.stdout.readline()
    except BrokenPipeError:
        answer = b""
    except BaseException:  # Ctrl-C: the next request would take a late answer for its own
        _end()
        raise
    if answer.endswith(b"\n"):
        return json.loads(answer)
    code = _end()
    return {"broken": f"it took more than {SECONDS} s" if code == -signal.SIGPROF else f"its process ended with {code}"}


def _started(name: str) -> Any:
    """Returns the running worker."""
    global _worker
    if _worker is None or _worker.poll() is not None:
        _end()
        path = os.pathsep.join(entry for entry in sys.path if entry)  # passed on: -S skips the slow search for it
        try:
            _worker = subprocess.Popen(
                [sys.executable, "-S", "-P", str(_WORKER), str(MEMORY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path},
            )
        except OSError as error:
            raise CheckpointError(f"{name}: no process for its chat template could be started ({error}); end other "
                                  "programs, or write the prompt yourself") from error
    return _worker


@atexit.register
def _end() -> int | None:
    """Ends the worker, if this process has one, and returns its exit code."""
    global _worker
    worker, _worker = _worker, None
    if worker is None:
        return None
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        with contextlib.suppress(OSError):  # bytes that a broken pipe did not take
            pipe.close()
    return worker.wait()


def _forget() -> None:
    """Forgets the worker after a fork: it answers the parent process."""
    global _worker, _lock
    _worker, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
