"""Talks about a document with a model, its KV cache on flash.

    python scripts/chat.py --model=DIR --document=FILE [--question="..."] [--method=kvswap] [--store=DIR] [--save=DIR]

DIR is a local Hugging Face directory; without it, the reference model answers. Without --question, questions are read
from standard input, one a line. With --save, the conversation is saved at its end, and goes on from there when it is
there already; it is then not read again. A model without a chat template gets the document and then each question, as
they are.
"""

import contextlib
import pathlib
import sys
from collections.abc import Iterator

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvjax
from kvjax.errors import KvjaxError
from kvjax.inference.chat import SAVED
from kvjax.methods import make

MODEL = flags.DEFINE_string("model", None, "directory of the model; the reference model if it is left out")
DOCUMENT = flags.DEFINE_string("document", None, "text file to talk about", required=True)
QUESTION = flags.DEFINE_string("question", None, "a question, in place of those on standard input")
METHOD = flags.DEFINE_enum("method", "kvswap", list(kvjax.METHODS), "method of the cache")
BUDGET = flags.DEFINE_integer("budget", 256, "tokens attended at one step", lower_bound=1)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "type of the weights, and of keys and values")
WEIGHTS = flags.DEFINE_enum("weights", None, ["int8", "int4"], "type of the weights in few bits, in place of --dtype")
STORE = flags.DEFINE_string("store", "~/.cache/kvjax/blocks", "directory for blocks of the cache")
SAVE = flags.DEFINE_string("save", None, "directory to save the conversation to, or to take it up from")
TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "most tokens of an answer", lower_bound=1)

REFERENCE = pathlib.Path(kvjax.__file__).parent / "reference"
SETTINGS = {"kvswap": {"sigma": 2, "bits": 4, "per_head": True}}


def questions() -> Iterator[str]:
    """Yields the questions, until an empty line or the end of standard input."""
    if QUESTION.value is not None:
        yield QUESTION.value
        return
    while True:
        print("\n> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def say(pieces: kvjax.Stream) -> kvjax.Result:
    """Prints an answer while it grows, and what it took; returns it."""
    for piece in pieces:
        print(piece, end="", flush=True)
    assert pieces.result is not None, "a stream ends with its result"
    print(f"\n[{pieces.result.ended}; {pieces.result.usage}]", file=sys.stderr)
    return pieces.result


def opened(llm: kvjax.LLM, document: str) -> kvjax.Chat:
    """Opens the conversation: a saved one, or one that begins with the document."""
    if SAVE.value is not None and (pathlib.Path(SAVE.value).expanduser() / SAVED).exists():
        print(f"[goes on from {SAVE.value}]", file=sys.stderr)
        return llm.restore_chat(SAVE.value)
    return llm.chat(document, **cache_settings())


def cache_settings() -> dict:
    """Returns the settings of the cache."""
    budget = {} if METHOD.value == "full" else {"budget": BUDGET.value}
    method = make(METHOD.value, {**budget, **SETTINGS.get(METHOD.value, {})})
    return {"method": method, "store": kvjax.FlashStore(directory=STORE.value), "dtype": DTYPE.value}


def talk(llm: kvjax.LLM, document: str) -> None:
    """Answers questions in turns of one conversation."""
    with opened(llm, document) as chat:
        print(f"[{chat.cache}]", file=sys.stderr)
        for question in questions():
            say(chat.stream(question, max_new_tokens=TOKENS.value, driver="fused"))
        if SAVE.value is not None:
            chat.save(SAVE.value)
        print(chat.cache.memory(), file=sys.stderr)


def complete(llm: kvjax.LLM, document: str) -> None:
    """Continues the document and each question, which a model without a template can do."""
    print("[the model has no chat template: document and question are continued]", file=sys.stderr)
    with llm.prefill(document, **cache_settings()) as cache:
        print(f"[{cache}]", file=sys.stderr)
        for question in questions():
            with say(llm.stream(f"\n\n{question}", cache, max_new_tokens=TOKENS.value, driver="fused")).cache:
                pass
        print(cache.memory(), file=sys.stderr)


def main(_) -> None:
    """Loads the model and answers."""
    kvjax.keep_programs()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            document = pathlib.Path(DOCUMENT.value).expanduser().read_text(encoding="utf-8", errors="replace")
            llm = kvjax.load(MODEL.value or REFERENCE, DTYPE.value, weights=WEIGHTS.value)
            print(f"[{llm}]", file=sys.stderr)
            (complete if llm.tokenizer.template is None else talk)(llm, document)
    except (KvjaxError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
