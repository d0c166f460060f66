"""lm-evaluation-harness itself over a local task of each kind of request; needs the extra `lm-eval`."""

import json
import pathlib

import pytest

import kvjax

pytestmark = pytest.mark.oracles

REFERENCE = pathlib.Path(kvjax.__file__).parent / "reference"
FILLER = "import os, sys\n" * 6
ROWS = [
    {"text": f"\nThe pass key is {key}.\n{FILLER}\nThe pass key is", "choices": [" 11111", f" {key}"], "key": str(key)}
    for key in (29318, 4711, 31059)
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the harness makes of three passkeys, asked in every way."""
    evaluator = pytest.importorskip("lm_eval.evaluator")
    from kvjax.eval.lm_eval import KvjaxLM

    folder = tmp_path_factory.mktemp("task")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
              "test_split": "test", "doc_to_text": "{{text}}"}
    tasks = [
        {**common, "task": "choose", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
         "doc_to_target": 1, "target_delimiter": "", "metric_list": [{"metric": "acc"}]},
        {**common, "task": "say", "output_type": "generate_until", "doc_to_target": " {{key}}",
         "generation_kwargs": {"until": ["."], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}]},
        {**common, "task": "read", "output_type": "loglikelihood_rolling", "doc_to_text": "",
         "doc_to_target": "{{text}}", "metric_list": [{"metric": "word_perplexity"}]},
    ]
    model = KvjaxLM(str(REFERENCE), method="quest", budget=64, window=8, page=4, store="flash", directory=str(folder))
    return evaluator.simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0)["results"]


def test_the_right_choice_is_the_likeliest(results):
    assert results["choose"]["acc,none"] == 1.0


def test_answers_end_where_the_task_says(results):
    assert results["say"]["exact_match,none"] == 1.0


def test_a_text_is_scored_token_by_token(results):
    assert 1 < results["read"]["word_perplexity,none"] < 1e6


def test_rolling_likelihood_is_that_of_a_forward_pass():
    from types import SimpleNamespace

    import jax
    import jax.numpy as jnp
    import numpy as np

    from kvjax.eval.lm_eval import KvjaxLM
    from kvjax.models.transformer import Transformer

    model = KvjaxLM(str(REFERENCE), max_length=2048)
    (found,) = model.loglikelihood_rolling([SimpleNamespace(args=(ROWS[0]["text"],))], disable_tqdm=True)
    tokens = jnp.asarray([[model.prefix_token_id, *model.llm.encode(ROWS[0]["text"], start=False)]])
    logits = Transformer(model.llm.config).apply(
        {"params": model.llm.params}, tokens, jnp.arange(tokens.shape[1])[None]
    )[0, :-1]
    chosen = jax.nn.log_softmax(logits)[np.arange(tokens.shape[1] - 1), tokens[0, 1:]]
    assert found == pytest.approx(float(chosen.sum()), abs=0.02)


def test_a_continuation_that_a_token_leaves_nothing_of_is_scored():
    from types import SimpleNamespace

    from kvjax.eval.lm_eval import KvjaxLM

    model = KvjaxLM(str(REFERENCE))
    spanned, whole = (SimpleNamespace(args=args) for args in (("The pass ke", "y"), ("The pass", " key")))
    found = model.loglikelihood([spanned, whole], disable_tqdm=True)
    assert all(logprob < 0 for logprob, _ in found) and found[0] != found[1]
