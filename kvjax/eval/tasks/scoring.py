"""Scores of answers; `METRICS` has every metric by name, a function that returns a number in 0..1.

Definitions are those of the benchmarks: RULER (Hsieh et al., 2024), LongBench (Bai et al., 2023; F1 as in SQuAD,
Rajpurkar et al., 2016), LongBench v2 (Bai et al., 2024), L-Eval (An et al., 2023), SCBench (Li et al., 2024), GSM8K
(Cobbe et al., 2021), AIME. If there are several right answers, LongBench's metrics take the best score.
"""

import collections
import difflib
import re
import string
from collections.abc import Callable, Sequence
from decimal import Decimal

from kvjax.eval.tasks import longgen

Metric = Callable[[str, Sequence[str], Sequence[str]], float]  # answer, right answers, all classes


def first_number(text: str) -> str | None:
    """Returns the first run of digits of an answer; None if there is none."""
    digits = re.search(r"\d+", text)
    return digits.group() if digits else None


def answers_number(text: str, value: str) -> bool:
    """Returns whether the first run of digits equals the value: the passkey and needle score."""
    return first_number(text) == value


def string_match_all(text: str, answers: Sequence[str]) -> float:
    """Returns RULER's score: the share of references that the answer contains, ignoring case."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def string_match_part(text: str, answers: Sequence[str]) -> float:
    """Returns RULER's score of qa: whether the answer contains any reference, ignoring case."""
    return float(any(answer.lower() in text.lower() for answer in answers))


def normalised(text: str) -> str:
    """Normalises as SQuAD does: lower case without punctuation and articles, single spaces."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(text: str, answer: str) -> float:
    """Returns SQuAD's exact match: whether both texts are equal once normalised."""
    return float(normalised(text) == normalised(answer))


def f1(text: str, answer: str) -> float:
    """Returns SQuAD's F1: harmonic mean of precision and recall of the normalised words."""
    given, wanted = normalised(text).split(), normalised(answer).split()
    shared = sum((collections.Counter(given) & collections.Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0


def rouge_l(text: str, answer: str) -> float:
    """Returns the plain ROUGE-L F1 of words between spaces (Lin, 2004).

    LongBench uses a package that splits sentences and counts repeated words once.
    """
    given, wanted = text.split(), answer.split()
    common = _longest_common_subsequence(given, wanted)
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


def _longest_common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    row = [0] * (len(b) + 1)
    for word in a:
        previous = row
        row = [0]
        for j, other in enumerate(b):
            row.append(previous[j] + 1 if word == other else max(previous[j + 1], row[j]))
    return row[-1]


def classification(text: str, answer: str, classes: Sequence[str]) -> float:
    """Returns LongBench's score of trec: 1 / number of classes that the answer names, if the right one is among them.

    A class that is part of the right one's name does not count as named.
    """
    named = [label for label in classes if label in text and not (label in answer and label != answer)]
    return 1 / len(named) if answer in named else 0.0


def share_of_numbers(text: str, answer: str) -> float:
    """Returns LongBench's score of counting and retrieval: share of the answer's integers that equal the right one.

    The right one is the first integer of `answer`, such as "7" or "Paragraph 7".
    """
    numbers = re.findall(r"\d+", text)
    return numbers.count(first_number(answer)) / len(numbers) if numbers else 0.0


def edit_similarity(text: str, answer: str) -> float:
    """Returns LongBench's score of code: similarity of the first line without comment or markup, in whole per cent."""
    lines = (line for line in text.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//")))
    return round(100 * difflib.SequenceMatcher(None, next(lines, ""), answer).ratio()) / 100


def choice(text: str, answer: str) -> float:
    """Returns LongBench v2's score: whether the first "The correct answer is (X)", or else "The correct answer is X",
    names the right one."""
    text = text.replace("*", "")
    said = re.search(r"The correct answer is \(([A-D])\)", text) or re.search("The correct answer is ([A-D])", text)
    return float(said is not None and said.group(1) == answer)


def chosen_letter(text: str) -> str:
    """Returns the option that an answer chooses by L-Eval: its first letter of A to D, wherever that stands.

    It is A if there is none, and "" without an answer. Several letters alone, such as "BC", are returned as they are.
    """
    text = text.lstrip()
    if text in "ABCD":
        return text
    letter = re.search("[A-D]", text)
    return letter.group() if letter else "A"


def chosen_letters(text: str) -> str:
    """Returns the options that an answer chooses by L-Eval where several may be right, such as "AC".

    They are the two or more letters with which it begins; or else that letter and those before a space, a full stop or
    a bracket, up to the word "Question"; or else the first letters; or else A. Without an answer it is "".
    """
    text = text.lstrip()
    if text in "ABCD":
        return text
    rest = text.lstrip("ABCD")
    first = text[: len(text) - len(rest)]
    if len(first) > 1:
        return "".join(sorted(set(first)))
    rest = rest.partition("Question")[0]
    marked = {*first, *re.findall(r"[A-D](?=[\s.)])", rest)}
    run = re.search("[A-D]+", rest)
    return "".join(sorted(marked)) or (run.group() if run else "A")


def choice_score(given: str, right: str) -> float:
    """Returns L-Eval's score of chosen options: 1 for all, 1/4 for some of the right ones and no wrong one, else 0."""
    return 1.0 if given == right else 0.25 if given and set(given) <= set(right) else 0.0


def true_false(text: str, answer: str) -> float:
    """Returns L-Eval's score of true or false: whether the first word that contains one of them contains the right one.

    A word that contains both is true.
    """
    said = re.search(r"\S*(true|false)\S*", text.lower())
    return float(said is not None and ("true" if "true" in said.group() else "false") == answer)


def contains(text: str, answer: str) -> float:
    """Returns L-Eval's score of names: whether the answer contains the right one, ignoring case and spaces."""
    return float(answer.lower().replace(" ", "") in text.lower().replace(" ", ""))


def book_choice(text: str, answers: Sequence[str]) -> float:
    """Returns SCBench's score of a choice: whether the answer is the right option or its letter.

    That is its first letter if it is one of A to D; else what follows "answer is" and the like; else its first word
    that is such a letter.
    """
    text = text.strip()
    if text[:1] in tuple("ABCD"):
        return float(text[0] in answers)
    if text in answers:
        return 1.0
    text = re.sub(" +", " ", re.sub("[\n\"'.,?!{}]", " ", text))
    for cue in ("answer is:", "answer:", "answer is", "option is"):
        if cue in text:
            said = text.partition(cue)[2][1:]
            return float(bool(said) and said.startswith(tuple(answers)))
    letters = (word for word in text.split() if word in "ABCD")
    return float(next(letters, "") in answers)


def aime(text: str, answer: str) -> float:
    r"""Returns AIME's score: whether the last \boxed{}, or the last number if there is no box, is the right integer.

    In a box, only what is behind the last = or \equiv counts, without text, units and degrees, and without \pmod{}.
    """
    given = _boxed_number(text) if re.search(r"\\boxed\s*\{", text) else last_number(text)
    return float(given is not None and given == number(answer))


def _boxed_number(text: str) -> Decimal | None:
    """Returns the number in the last, innermost box that is closed; None if it is not one."""
    box = None
    for start in re.finditer(r"\\boxed\s*\{", text):
        depth, end = 1, start.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if not depth:
            box = text[start.end() : end - 1]
    if box is None:
        return None
    content = re.split(r"=|\\equiv", box)[-1]
    content = re.sub(r"\\pmod\s*\{[^{}]*\}|\^\s*\{?\s*\\circ\s*\}?|\\degree", "", content)
    content = re.sub(r"\\(?:text|textbf|textit|mathbf|mathrm|boxed)\s*(?=\{)|\\[ ,;:!]", " ", content)
    return None if "\\" in content else number(re.sub(r"[a-zA-Z{}\s]+", " ", content).strip())


def number(text: str) -> Decimal | None:
    """Returns the number that a text is, such as "$1,234.50"; None if it is not one."""
    digits = text.replace(",", "").replace("$", "").rstrip(".")
    return Decimal(digits) if re.fullmatch(r"-?\d*\.?\d+", digits) else None


def said_number(text: str) -> Decimal | None:
    """Returns N of "The answer is N"; None if the text does not say so."""
    said = re.search(r"The answer is (-?\$?[\d.,]+)", text)
    return number(said.group(1)) if said else None


def last_number(text: str) -> Decimal | None:
    """Returns the last number of an answer; None if there is none."""
    numbers = re.findall(r"-?\$?\d[\d,]*(?:\.\d+)?", text)
    return number(numbers[-1]) if numbers else None


def gsm8k_strict(text: str, answer: str) -> float:
    """Returns GSM8K's strict score: whether the text says "The answer is N" with the right N."""
    return float(said_number(text) is not None and said_number(text) == number(answer))


def gsm8k(text: str, answer: str) -> float:
    """Returns GSM8K's score: whether N of "The answer is N", or else the last number, is right."""
    said = said_number(text)
    given = last_number(text) if said is None else said
    return float(given is not None and given == number(answer))


def _best(metric: Callable[[str, str], float]) -> Metric:
    """Returns a metric that takes the best score over the right answers."""
    return lambda text, answers, classes: max((metric(text, answer) for answer in answers), default=0.0)


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
    "letter": _best(lambda text, answer: choice_score(chosen_letter(text), answer)),
    "letters": _best(lambda text, answer: choice_score(chosen_letters(text), answer)),
    "true_false": _best(true_false),
    "contains": _best(contains),
    "includes": _best(lambda text, answer: float(answer in text)),
    "book_choice": lambda text, answers, classes: book_choice(text, answers),
    "aime": _best(aime),
    "gsm8k": _best(gsm8k),
    "gsm8k_strict": _best(gsm8k_strict),
    "longgen": lambda text, answers, classes: longgen.check(text, answers).score,
}
FIRST_LINE = "_first_line"  # suffix for LongBench's trec, triviaqa, samsum and lsht


def score(metric: str, text: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Scores an answer.

    Args:
      metric: name in METRICS; with the suffix `_first_line` only the first line of the answer counts.
      text: answer.
      answers: right answers.
      classes: all labels of a classification.

    Returns:
      A number in 0..1.
    """
    name = metric.removesuffix(FIRST_LINE)
    if name != metric:
        text = text.lstrip("\n").split("\n")[0]
    return METRICS[name](text, answers, classes)
