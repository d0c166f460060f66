"""Needle tasks: sizes, depths, and that every answer is where it is said to be."""

import dataclasses
import re
from collections import Counter

import pytest
from tokenizers import Tokenizer

from kvjax.errors import ConfigError
from kvjax.eval import tasks
from kvjax.eval.tasks import ruler, ruler_lists

HIDING = ("passkey", "needle", "needle_of_4", "niah_grid", "multi_request")


def words_of(text: str) -> list[str]:
    """The words of a numbered list."""
    return re.findall(r"\d+\. (\S+)", text)


@pytest.mark.parametrize("name", HIDING)
def test_each_answer_is_in_its_context_after_its_question(name, request_for):
    request = request_for(count=4)
    for one in tasks.draw(name, request):
        text, cue = (request.tokenizer.decode(ids) for ids in (one.context, one.question))
        assert len(one.context) + len(one.question) <= request.length
        assert text.count(f"{cue.strip()} {one.answers[0]}.") == 1
        at = text.index(cue.strip()) / len(text)
        assert at == pytest.approx(one.depth, abs=0.15)


@pytest.mark.parametrize("name", [*HIDING[:4], "mqar", "perplexity", "niah_single_2", "vt", "cwe", "fwe", "longgen"])
def test_the_same_seed_draws_the_same_samples_and_another_seed_others(name, request_for):
    first, again, other = (tasks.draw(name, request_for(1_100, 2, seed)) for seed in (3, 3, 4))
    assert first == again != other


def test_depths_of_the_grid_go_from_start_to_end_and_needles_follow_sentences(request_for):
    request = request_for(count=5)
    samples = tasks.draw("niah_grid", request)
    assert samples[0].depth == 0 and samples[-1].depth == 1
    for one in samples[1:-1]:
        text, cue = (request.tokenizer.decode(ids) for ids in (one.context, one.question))
        before = text.partition("\n" + cue.strip())[0]
        assert before.rstrip(" ").endswith((".", "!", "?", "\n"))


def test_many_questions_share_one_context(request_for):
    samples = tasks.draw("multi_request", request_for(count=11))
    assert {one.context for one in samples[:8]} == {samples[0].context} != {one.context for one in samples[8:]}
    assert len({one.context for one in samples}) == 2 and len({one.question for one in samples}) == 11


def test_needles_in_what_is_decoded_are_at_their_places_and_not_in_the_prompt(request_for):
    request = request_for(count=5, length=100, new_tokens=400)
    samples = tasks.draw("decoded_needles", request)
    assert len({(one.context, one.decoded) for one in samples}) == 1
    assert [one.depth for one in samples] == [0.1, 0.3, 0.5, 0.7, 0.9]
    for one in samples:
        prompt, decoded, cue = (request.tokenizer.decode(ids) for ids in (one.context, one.decoded, one.question))
        assert (len(one.context), len(one.decoded)) == (100, 400)
        assert decoded.count(f"{cue.strip()} {one.answers[0]}.") == 1 and one.answers[0] not in prompt
        assert decoded.index(cue.strip()) / len(decoded) == pytest.approx(one.depth, abs=0.15)
    with pytest.raises(ConfigError, match="raise new_tokens"):
        tasks.draw("decoded_needles", request_for(new_tokens=20))


def test_what_does_not_fit_is_refused(request_for):
    for name in ("multi_request", "niah_grid", "niah_single_1", "cwe", "mqar"):
        with pytest.raises(ConfigError, match="raise"):
            tasks.draw(name, request_for(length=2))
    with pytest.raises(ConfigError, match="vocabulary"):
        tasks.draw("mqar", request_for(length=9000))
    with pytest.raises(ConfigError, match="longer text"):
        tasks.draw("perplexity", request_for(length=90_000))
    for name in ("passkey", "niah_grid", "multi_request"):
        with pytest.raises(ConfigError, match="give a longer one"):
            tasks.draw(name, request_for(length=90_000))


@pytest.mark.parametrize("name", ruler.NIAH)
def test_ruler_hides_what_its_table_says(name, request_for):
    task, request = ruler.NIAH[name], request_for(length=1_000, count=2)
    for one in tasks.draw(name, request):
        facts = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", one.context)
        asked = [key for key in dict(facts) if key in one.question]
        assert len(asked) == task.queries and one.answers != ()
        assert sorted(one.answers) == sorted(value for key, value in facts if key in asked)
        assert len(one.answers) == task.values * task.queries
        if task.hay != "needles":
            assert Counter(key for key, _ in facts).total() == task.keys * task.values
        else:
            assert len(facts) > 5 and one.context.count("\n") == len(facts) + 1  # the hay is needles alone
        pattern = {"numbers": r"\d{7}", "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"}
        assert all(re.fullmatch(pattern[task.value], value) for _, value in facts)
        assert (ruler.NOISE in one.context) == (task.hay == "noise") and one.metric == "string_match_all"


@pytest.mark.parametrize("name", [*ruler.NIAH, "vt", "cwe", "fwe"])
def test_ruler_fills_its_length_and_leaves_room_for_the_answer(name, request_for):
    request = request_for(length=1_500, count=1)
    (one,) = tasks.draw(name, request)
    used = 1 + request.tokens(one.context) + request.tokens(one.question) + one.max_new_tokens
    unit = 160 if name in ("niah_multikey_3", "fwe") else 70  # tokens of the largest piece of hay
    assert 1_500 - unit < used <= 1_500


def test_a_chain_of_variables_leads_from_its_value_to_every_name(request_for):
    (one,) = tasks.draw("vt", request_for(length=1_100, count=1))
    links = dict(re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", one.context))
    assert set(links) == set(one.answers) and len(one.answers) == 5
    value = re.search(r"assigned the value (\d{5})", one.question).group(1)
    for name in one.answers:
        while name in links:
            name = links[name]
        assert name == value
    assert re.search(r"they are:  ([A-Z]{3} ?){5}\n", one.context)  # the solved example


@pytest.mark.parametrize(("length", "often", "rarely"), [(1_500, 6, 1), (4_500, 30, 3)])
def test_common_words_are_as_common_as_ruler_has_them(length, often, rarely, request_for):
    (one,) = tasks.draw("cwe", request_for(length=length, count=1))
    counts = Counter(words_of(one.context.rpartition("appear most often.\n")[2]))
    assert {counts[word] for word in one.answers} == {often} and len(one.answers) == 10
    assert {count for word, count in counts.items() if word not in one.answers} == {rarely}


def test_the_most_frequent_words_after_the_dots_are_the_answer(request_for):
    (one,) = tasks.draw("fwe", request_for(length=2_000, count=1))
    words = re.findall(r"\S+", one.context.partition("coded words. ")[2])
    ranked = Counter(words).most_common(5)
    assert ranked[0][0] == "..." and tuple(word for word, _ in ranked[1:4]) == one.answers
    assert ranked[3][1] > ranked[4][1]
    assert ranked[1][1] / ranked[0][1] == pytest.approx(1 / 4, rel=0.1)  # 2^-alpha


def test_more_words_than_the_library_has_are_made_up(request_for):
    words = ruler_lists._words(request_for().rng, 5_000)
    assert len(set(words)) == 5_000


def test_every_key_of_a_recall_is_followed_by_its_value_again(request_for):
    for one in tasks.draw("mqar", request_for(length=300)):
        pairs = dict(zip(one.context[2::3], one.context[3::3], strict=True))
        asked = dict(zip(one.tokens[1::3], one.tokens[2::3], strict=True))
        assert len(asked) == 16 and asked.items() <= pairs.items()
        assert [token for token, counts in zip(one.tokens, one.scored, strict=True) if counts] == list(asked.values())
        assert len(one.context) <= 300 and not set(pairs) & set(pairs.values())


def test_a_recall_has_no_added_tokens(request_for):
    """Wherever in the vocabulary they are."""
    request = request_for(length=9_000, count=1)
    ours = Tokenizer.from_str(request.tokenizer.tokenizer.to_str())
    ours.add_special_tokens([f"<|reserved_{i}|>" for i in range(4_000)])
    (one,) = tasks.draw("mqar", dataclasses.replace(
        request, length=4_000, tokenizer=dataclasses.replace(request.tokenizer, tokenizer=ours)))
    assert not set(one.context[1:]) & set(ours.get_added_tokens_decoder())


def test_perplexity_continues_its_context(request_for):
    request = request_for(count=2, new_tokens=7)
    for one in tasks.draw("perplexity", request):
        assert len(one.context) == 600 and len(one.tokens) == 7 and all(one.scored)
        whole, stream = (*one.context[1:], *one.tokens), request.stream.tolist()
        assert any(tuple(stream[i : i + 606]) == whole for i in range(len(stream) - 605))


def test_token_ids_serve_as_text(request_for, tokenizer):
    request = request_for()
    ids = tasks.Request(tokenizer, request.stream, 600, 3, request_for().rng)
    assert tasks.draw("needle", ids) == tasks.draw("needle", request_for())
    assert ids.words == request.words
