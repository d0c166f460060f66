"""Scores of answers: `METRICS` has every metric by name, from an answer and the right ones to a number in 0..1.

Definitions are those of the benchmarks: RULER (Hsieh et al., 2024), LongBench (Bai et al., 2023; F1 as in SQuAD,
Rajpurkar et al., 2016), LongBench v2 (Bai et al., 2024), GSM8K (Cobbe et al., 2021). Where several answers are right,
LongBench's metrics take the best.
"""

import collections
import difflib
import re
import string
from collections.abc import Callable, Sequence
from decimal import Decimal

from kvjax.eval.tasks import longgen

Metric = Callable[[str, Sequence[str], Sequence[str]], float]  # answer, right ones, all classes


def first_number(text: str) -> str | None:
    """The first run of digits of an answer, None if there is none."""
    found = re.search(r"\d+", text)
    return found.group() if found else None


def answers_number(text: str, value: str) -> bool:
    """Passkey and needle score: the first run of digits equals the value."""
    return first_number(text) == value


def string_match_all(text: str, answers: Sequence[str]) -> float:
    """RULER: share of the references that the answer contains, whatever their case."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def string_match_part(text: str, answers: Sequence[str]) -> float:
    """RULER's qa: whether the answer contains any reference."""
    return float(any(answer.lower() in text.lower() for answer in answers))


def normalised(text: str) -> str:
    """SQuAD's: lower case without punctuation and articles, single spaces."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(text: str, answer: str) -> float:
    """SQuAD: equal once normalised."""
    return float(normalised(text) == normalised(answer))


def f1(text: str, answer: str) -> float:
    """SQuAD: harmonic mean of precision and recall of the normalised words."""
    found, wanted = normalised(text).split(), normalised(answer).split()
    shared = sum((collections.Counter(found) & collections.Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted)) if shared else 0.0


def rouge_l(text: str, answer: str) -> float:
    """ROUGE-L F1 of words between spaces (Lin, 2004).

    LongBench takes it from a package that splits sentences and counts repeated words once; this is the plain one.
    """
    found, wanted = text.split(), answer.split()
    common = _longest_common_subsequence(found, wanted)
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def _longest_common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    row = [0] * (len(b) + 1)
    for word in a:
        previous = row
        row = [0]
        for j, other in enumerate(b):
            row.append(previous[j] + 1 if word == other else max(previous[j + 1], row[j]))
    return row[-1]


def classification(text: str, answer: str, classes: Sequence[str]) -> float:
    """LongBench's trec: 1 / number of classes that the answer names, if the right one is among them.

    A class that is part of the right one's name does not count as named.
    """
    named = [label for label in classes if label in text and not (label in answer and label != answer)]
    return 1 / len(named) if answer in named else 0.0


def share_of_numbers(text: str, answer: str) -> float:
    """LongBench's count and retrieval: share of the answer's integers that equal the one of "7" or "Paragraph 7"."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(first_number(answer)) / len(numbers) if numbers else 0.0


def edit_similarity(text: str, answer: str) -> float:
    """LongBench's code: similarity of the first line that is neither comment nor markup, in whole per cent."""
    lines = (line for line in text.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//")))
    return round(100 * difflib.SequenceMatcher(None, next(lines, ""), answer).ratio()) / 100


def choice(text: str, answer: str) -> float:
    """LongBench v2: "The correct answer is (X)", with or without brackets."""
    said = re.search(r"The correct answer is \(?([A-D])\b", text.replace("*", ""))
    return float(said is not None and said.group(1) == answer)


def number(text: str) -> Decimal | None:
    """A text that is a number, such as "$1,234.50"; None for others."""
    digits = text.replace(",", "").replace("$", "").rstrip(".")
    return Decimal(digits) if re.fullmatch(r"-?\d*\.?\d+", digits) else None


def said_number(text: str) -> Decimal | None:
    """N of "The answer is N"; None if it is not said so."""
    said = re.search(r"The answer is (-?\$?[\d.,]+)", text)
    return number(said.group(1)) if said else None


def last_number(text: str) -> Decimal | None:
    """The last number of an answer."""
    found = re.findall(r"-?\$?\d[\d,]*(?:\.\d+)?", text)
    return number(found[-1]) if found else None


def gsm8k_strict(text: str, answer: str) -> float:
    """GSM8K: "The answer is N" with the right N."""
    return float(said_number(text) is not None and said_number(text) == number(answer))


def gsm8k(text: str, answer: str) -> float:
    """GSM8K: the right number in "The answer is N", or as the last number where nothing is said so."""
    said = said_number(text)
    found = last_number(text) if said is None else said
    return float(found is not None and found == number(answer))


def _best(one: Callable[[str, str], float]) -> Metric:
    """The best over the right answers."""
    return lambda text, answers, classes: max((one(text, answer) for answer in answers), default=0.0)


METRICS: dict[str, Metric] = {
    "number": _best(lambda text, answer: float(answers_number(text, answer))),
    "string_match_all": lambda text, answers, classes: string_match_all(text, answers),
    "string_match_part": lambda text, answers, classes: string_match_part(text, answers),
    "exact_match": _best(exact_match),
    "f1": _best(f1),
    "rouge_l": _best(rouge_l),
    "classification": lambda text, answers, classes: max(classification(text, one, classes) for one in answers),
    "share_of_numbers": _best(share_of_numbers),
    "edit_similarity": _best(edit_similarity),
    "choice": _best(choice),
    "gsm8k": _best(gsm8k),
    "gsm8k_strict": _best(gsm8k_strict),
    "longgen": lambda text, answers, classes: longgen.check(text, answers).mean,
}
FIRST_LINE = "_first_line"  # LongBench's trec, triviaqa and samsum


def score(metric: str, text: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The answer's score in 0..1. Metrics that end in `_first_line` look at no more of the answer."""
    name = metric.removesuffix(FIRST_LINE)
    if name != metric:
        text = text.lstrip("\n").split("\n")[0]
    return METRICS[name](text, answers, classes)
