"""Long texts in blocks, checked against instructions by hand."""

import math

import pytest

from kvjax.eval import tasks
from kvjax.eval.tasks import longgen, scoring

ANSWERS = ("6", "once 2 2 1 rain", "once 5 5 1 snow", "range 1 3 1 tea", "periodic 2 6 2 bus")
TEXT = "#*# Day 1: Tea. #*# Day 2: RAIN and tea, a bus. #*# Day 4: bus. #*# Day 6: none. #*# Day 2: again, no tea"


def test_shares_are_over_blocks_that_exist():
    found = longgen.check(TEXT, ANSWERS)
    assert found.completion == pytest.approx(4 / 6)  # days 1, 2, 4 and 6
    assert found.once == 1.0  # day 5 is not there
    assert found.range == 1.0  # days 1 and 2 of 1, 2, 3
    assert found.periodic == pytest.approx(2 / 3)  # days 2 and 4, not 6
    assert found.mean == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert scoring.score("longgen", TEXT, ANSWERS) == pytest.approx(found.completion * found.mean)


def test_a_text_without_marks_is_the_first_block():
    found = longgen.check(" fine", ANSWERS)
    assert found.completion == pytest.approx(1 / 6) and math.isnan(found.once) and found.mean == 0
    assert longgen.check(" tea", ANSWERS).mean == 1  # all that day 1 was told, by a range


def test_an_answer_that_does_all_it_is_told_scores_everything(request_for):
    for one in tasks.draw("longgen", request_for(length=900)):
        days = int(one.answers[0])
        told = [longgen.Instruction.decode(line) for line in one.answers[1:]]
        assert {line.kind for line in told} == {"once", "range", "periodic"}
        assert all(str(line) in one.context and line.encode() in one.answers for line in told)
        text = "".join(
            f"#*# Day {n}: " * (n > 1) + " ".join(line.word for line in told if n in line.blocks)
            for n in range(1, days + 1)
        )
        for answer in (text, f"\n{one.question}{text}"):  # going on from the question, or saying it once more
            found = longgen.check(answer, one.answers)
            assert (found.completion, found.mean) == (1, 1)
        assert longgen.check(text.replace("Day 2:", "Day 1000:"), one.answers).completion == (days - 1) / days
        taken = len(request_for().tokenizer.encode(one.context)) + one.max_new_tokens
        assert taken <= 1.1 * 900 and days > 4
