"""Metrics against values worked out by hand, and against other implementations where they are installed."""

import math

import pytest

from kvjax.eval.tasks import scoring
from kvjax.eval.tasks.scoring import score


@pytest.mark.parametrize(("metric", "text", "answers", "expected"), [
    ("number", " is 123, not 45", ["123"], 1.0),
    ("number", " is 1234", ["123"], 0.0),
    ("number", "none", ["123"], 0.0),
    ("string_match_all", "Blue and RED", ["red", "green", "blue", "Bl"], 0.75),
    ("string_match_part", "it was Paris.", ["london", "paris"], 1.0),
    ("string_match_part", "it was Rome.", ["london", "paris"], 0.0),
    ("exact_match", " The  Cat!", ["a cat"], 1.0),
    ("exact_match", "The cats", ["cat"], 0.0),
    # words found: cat sat on mat (articles go), wanted: cat on hat; 2 shared -> 2 * 2 / (4 + 3)
    ("f1", "The cat sat on a mat.", ["cat on the hat"], 4 / 7),
    ("f1", "the the", ["the"], 0.0),
    ("f1", "x x y", ["x x x", "z"], 2 * 2 / 6),
    # longest common subsequence a c d -> 2 * 3 / (4 + 5)
    ("rouge_l", "a b c d", ["a x c d y"], 6 / 9),
    ("rouge_l", "b a", ["a b"], 0.5),
    ("rouge_l", "", ["a b"], 0.0),
    ("share_of_numbers", "3 or 4, then 3", ["3"], 2 / 3),
    ("share_of_numbers", "Paragraph 12", ["Paragraph 12"], 1.0),
    ("share_of_numbers", "Paragraph 1", ["Paragraph 12"], 0.0),
    ("share_of_numbers", "none", ["12"], 0.0),
    # the second line counts; "return x" matches, 8 characters of 8 and of 10 -> 2 * 8 / 18 = 0.888.. in whole per cent
    ("edit_similarity", "\n# comment\nreturn x\nmore", ["return x+1"], 0.89),
    ("edit_similarity", "```\n// a", ["x"], 0.0),
    ("choice", "**The correct answer is (B)**", ["B"], 1.0),
    ("choice", "The correct answer is C.", ["C"], 1.0),
    ("choice", "The correct answer is (B), not (C)", ["C"], 0.0),
    ("choice", "B", ["B"], 0.0),
    ("choice", "The correct answer is A. No: The correct answer is (B)", ["B"], 1.0),  # as the benchmark has it
    ("choice", "The correct answer is C1", ["C"], 1.0),
    ("choice", "The correct answer is (B", ["B"], 0.0),
    ("gsm8k_strict", "5 + 4 = 9. The answer is 9.", ["9"], 1.0),
    ("gsm8k_strict", "The answer is $1,234.00.", ["1234"], 1.0),
    ("gsm8k_strict", "so 9", ["9"], 0.0),
    ("gsm8k", "so it is 1,009 in all", ["1009"], 1.0),
    ("gsm8k", "The answer is 8. I checked 9", ["9"], 0.0),
    ("gsm8k", "-3 then", ["-3"], 1.0),
    ("gsm8k", "no number", ["3"], 0.0),
    ("letter", " C. because", ["C"], 1.0),
    ("letter", "the answer is (B)", ["B"], 1.0),
    ("letter", "Because of (C)", ["C"], 0.0),  # L-Eval takes the first letter, here that of a word
    ("letter", "no idea", ["A"], 1.0),  # an answer without a letter is A
    ("letter", "  ", ["A"], 0.0),
    ("letter", "AB", ["A"], 0.0),
    ("letters", "AC", ["AC"], 1.0),
    ("letters", "CA and more", ["AC"], 1.0),
    ("letters", "A. this, C. those", ["AC"], 1.0),
    ("letters", "A", ["AC"], 0.25),
    ("letters", "AB", ["AC"], 0.0),
    ("letters", "A Question 2: C.", ["A"], 1.0),
    ("letters", "the options are BD", ["BD"], 1.0),
    ("letters", "", ["A"], 0.0),
    ("letters", "none", ["AB"], 0.25),  # it is A
    ("true_false", "It is False, not true", ["false"], 1.0),
    ("true_false", "**True**", ["true"], 1.0),
    ("true_false", "untrue or false", ["false"], 0.0),
    ("true_false", "true/false", ["false"], 0.0),
    ("true_false", "yes", ["true"], 0.0),
    ("contains", "the first topic was: The Role of  Art.", ["the role of art"], 1.0),
    ("contains", "the role of arts", ["The role of music"], 0.0),
    ("includes", "the value is aB1", ["aB1"], 1.0),
    ("includes", "the value is ab1", ["aB1"], 0.0),
    ("book_choice", " C. blue", ["blue", "C"], 1.0),
    ("book_choice", "blue", ["blue", "C"], 1.0),
    ("book_choice", "the answer is: C", ["blue", "C"], 1.0),
    ("book_choice", "the answer is red, or C", ["blue", "C"], 0.0),
    ("book_choice", "it must be (C) D C", ["blue", "D"], 1.0),  # the first word that is a letter
    ("book_choice", "", ["blue", "C"], 0.0),
    ("aime", r"\boxed{5} then \boxed{025}", ["25"], 1.0),
    ("aime", r"so 25, \boxed{m + n = 73}", ["73"], 1.0),
    ("aime", r"\boxed{\frac{1}{2}} and 2", ["2"], 0.0),
    ("aime", r"\boxed{} 2", ["2"], 0.0),
    *(("aime", rf"\boxed{{{box}}}", ["204"], 1.0) for box in (
        r"204^\circ", r"204^{\circ}", r"\text{204}", r"204\text{ cm}", r"x\equiv 204", r"204\pmod{1000}", r"\ 204",
        r"\mathbf{204}", r"\boxed{204}", "m+n = 204", "1,204 = 204")),
    *(("aime", rf"204 \boxed{{{box}}} 204", ["204"], 0.0) for box in (
        r"\frac{\sqrt{3}}{204}", r"\frac{{{1}}}{204}", "3 204", "204x + 1", "-204", "204.5")),
    ("aime", r"204 \boxed{204", ["204"], 0.0),  # cut off
    ("aime", "there are 12 of 204.", ["204"], 1.0),
    ("aime", "none", ["0"], 0.0),
    ("f1_first_line", "\ncat\ndog", ["cat"], 1.0),
    ("rouge_l_first_line", "a b\nc", ["a b"], 1.0),
])
def test_scores_are_those_worked_out_by_hand(metric, text, answers, expected):
    assert score(metric, text, answers) == pytest.approx(expected)


def test_classification_shares_its_point_among_the_classes_named():
    classes = ("Human", "Human group", "City", "Date")
    assert score("classification", "City", ["City"], classes) == 1.0
    assert score("classification", "City or Date", ["City"], classes) == 0.5
    assert score("classification", "Human group", ["Human group"], classes) == 1.0  # "Human" is part of its name
    assert score("classification", "Human group", ["Human"], classes) == 0.5
    assert score("classification", "Date", ["City"], classes) == 0.0
    assert score("classification_first_line", "City\nDate", ["City"], classes) == 1.0


def test_a_number_is_found_only_where_there_is_one():
    assert scoring.said_number("The answer is ...") is None and scoring.last_number("...") is None
    assert scoring.last_number("1 and 2.5.") == scoring.said_number("The answer is 2.50") == pytest.approx(2.5)


def test_no_number_is_not_the_right_one():
    assert score("gsm8k", "I do not know", ["1/2 cup"]) == score("gsm8k_strict", "I do not know", ["1/2 cup"]) == 0.0


@pytest.mark.oracles
def test_rouge_l_is_that_of_rouge_score():
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    for text, answer in (("a b c d e a b", "b a c a b"), ("x", "x y z"), ("p q", "r s"), ("m n m n m", "n m n")):
        theirs = scorer.score(answer, text)["rougeL"].fmeasure
        assert math.isclose(scoring.rouge_l(text, answer), theirs, abs_tol=1e-9)
