"""A context, questions about it, and their answers where they are known: made up, or a user's own."""

import dataclasses
import hashlib
import pathlib

import ml_collections
import numpy as np

import kvjax
from experiments import common
from kvjax.errors import ConfigError, PromptError
from kvjax.eval.tasks import corpus, needles

_NEEDLE_TOKENS, _TEXT_TOKENS = 8, 64  # of an answer


@dataclasses.dataclass(frozen=True)
class Job:
    """A context in tokens, questions about it, and their answers where they are known."""

    context: list[int]
    questions: tuple[str, ...]
    answers: tuple[str | None, ...]
    stop: tuple[str, ...] = ()  # strings that end an answer


def reference_job(llm: kvjax.LLM, config: ml_collections.ConfigDict) -> Job:
    """Draws held-out library text of `context` tokens with needles, and a question for each needle."""
    common.check_some(config, "needles")
    rng = np.random.default_rng(config.seed)
    stream = common.held_out_tokens(llm)
    words = rng.choice(corpus.key_words(held_out=True), size=len(config.needles), replace=False)
    facts = [
        needles.Needle(_cue(cue, word), needles.draw_value(rng, config.digits, held_out=True))
        for cue, word in zip(config.needles, words, strict=True)
    ]
    depths = np.linspace(0.1, 0.9, len(facts)).tolist()
    tokenizer, start = llm.tokenizer.tokenizer, llm.tokenizer.start_ids
    context = needles.haystack(rng, tokenizer, stream, config.context, facts, depths, start)
    questions, answers = zip(*(("\n" + fact.cue, fact.value) for fact in facts), strict=True)
    return Job(context, questions, answers, (".", "\n"))


def _cue(template: str, word: str) -> str:
    """Returns the sentence with its key word; raises ConfigError for a template that does not accept one."""
    try:
        return template.format(key=word)
    except (LookupError, ValueError, AttributeError, TypeError) as cause:
        raise ConfigError(f"needle {template!r} is not a sentence with at most {{key}} to fill in; "
                          "correct it") from cause


def user_job(llm: kvjax.LLM, config: ml_collections.ConfigDict) -> Job:
    """Reads a user's text and question; raises PromptError if one is missing or empty."""
    if not config.prompt_file:
        raise PromptError("there is a question but no text; give --config.prompt_file=FILE, too")
    path = pathlib.Path(config.prompt_file)
    try:
        if not path.is_file():
            raise PromptError(f"prompt_file={config.prompt_file} is not a file; give the path of a text file")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PromptError(f"prompt_file={config.prompt_file} cannot be read: {error}; give a text file") from error
    if not text.strip():
        raise PromptError(f"prompt_file={config.prompt_file} is empty; give a file with text in it")
    if not config.question:
        raise PromptError('there is a text but no question; give --config.question="...", too')
    before, question = _in_template(llm, text, config.question) if config.chat else (text, f"\n\n{config.question}")
    ids = llm.tokenizer.encode(before, add_special_tokens=not config.chat)
    return Job(llm.encode(ids, start=False), (question,), (None,))


def _in_template(llm: kvjax.LLM, text: str, question: str) -> tuple[str, str]:
    """Returns the chat template around a text and a question, cut before the question."""
    mark = "<<<the question>>>"
    chat = llm.tokenizer.apply_chat_template([{"role": "user", "content": f"{text}\n\n{mark}"}])
    if chat.count(mark) != 1:
        raise PromptError("the model's chat template alters or repeats the message; use --config.chat=False")
    before, _, after = chat.rpartition(mark)
    return before, question + after


def fingerprint(llm: kvjax.LLM, job: Job) -> str:
    """Returns a digest of the model and the job, independent of file names."""
    return hashlib.sha256(repr((llm.fingerprint, job)).encode()).hexdigest()[:16]


def capacity(llm, job, config) -> int:
    """Returns the tokens of the context, all questions and their answers."""
    asked = sum(len(llm.encode(question, start=False)) for question in job.questions)
    return len(job.context) + asked + len(job.questions) * answer_tokens(config)


def answer_tokens(config: ml_collections.ConfigDict) -> int:
    """Returns the most tokens of an answer: the configured number, else enough for a needle's digits or a few
    sentences."""
    return config.max_new_tokens or (_TEXT_TOKENS if config.prompt_file else _NEEDLE_TOKENS)
