"""Process that renders chat templates (`kvjax.models.chat_template`); imports nothing of kvjax, which would be slow.

Requests and answers are JSON objects, one per line. An answer has the `text`, the reason why the template `refuses` the
messages, or the reason why it is `broken`. Taking more processor time than the request allows ends the process.
"""

import datetime
import functools
import json
import resource
import signal
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Refused(Exception):
    """Call of `raise_exception` by a template."""


class _GenerationBlock(jinja2.ext.Extension):
    """Block `{% generation %}`, which marks an answer for training masks and does not change the text."""

    tags = {"generation"}  # noqa: RUF012 (the type that jinja2 declares)

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Returns a sandboxed environment with the dialect of Hugging Face's templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message) -> None:
    raise Refused(str(message))


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _answer(request: dict) -> dict:
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # processor time; the signal ends the process
    try:
        text = _compiled(request["template"]).render(request["names"])
        if len(text) > request["characters"]:
            return {"broken": f"it makes more than {request['characters']} characters of these messages"}
        return {"text": text}
    except Refused as error:
        return {"refuses": str(error)}
    except MemoryError:
        return {"broken": "it takes too much memory"}
    except Exception as error:  # the template is a program, which may raise anything
        return {"broken": f"{error}"[:1000]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(memory: int) -> None:
    """Answers requests until the input ends, with at most `memory` bytes of address space."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C and ends this one
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(_answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
