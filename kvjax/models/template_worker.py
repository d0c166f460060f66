"""The process that fills in chat templates (`kvjax.models.chat_template`); imports nothing of kvjax, which takes long.

It reads requests from its input, a JSON object on each line, and answers each with one: the `text`, why the template
`refuses` the messages, or why it is `broken`. What takes more than the request allows ends the process.
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
    """A template's own `raise_exception`."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks an answer for training masks; for text it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the type that jinja2 declares)

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the dialect of Hugging Face's templates, in a sandbox: a template is foreign code."""
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
    # Jinja's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message) -> None:
    raise Refused(str(message))


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _answer(request: dict) -> dict:
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # of processor time; its signal ends the process
    try:
        text = _compiled(request["template"]).render(request["names"])
        if len(text) > request["characters"]:
            return {"broken": f"it makes more than {request['characters']} characters of these messages"}
        return {"text": text}
    except Refused as error:
        return {"refuses": str(error)}
    except MemoryError:
        return {"broken": "it takes too much memory"}
    except Exception as error:  # the template is a program, which fails as it likes
        return {"broken": f"{error}"[:1000]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(memory: int) -> None:
    """Answers requests until the input ends, with at most so many bytes of address space."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, which ends this one
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(_answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
