"""Adapters for text of one's own."""

import json
import shutil

import pytest

import kvjax
from configs.train_svd import get_config
from experiments import common
from experiments.training import train_svd
from kvjax.calibration import refine_adapters
from kvjax.errors import ConfigError
from kvjax.methods.shared import adapters


def make_config(*files, **settings):
    config = get_config("smoke")
    config.update(kinds=tuple(map(str, files)), length=64, train_batches=1, **{"steps": 0} | settings)
    return config


def test_a_file_is_a_kind_of_text(tmp_path):
    """Fitted to its first four fifths, tried on the rest; where it came from is not in the name."""
    file = tmp_path / "mine.txt"
    file.write_text("def main(argv):\n    return [int(one) for one in argv]\n" * 60)
    train_svd.run(make_config(file), str(tmp_path / "run"))
    row = json.loads((tmp_path / "run" / "summary.json").read_text())["rows"][0]
    assert row["fitted_on"] == row["task"] == train_svd.name_of(str(file)) and 0 < row["reconstruction_error"] < 1
    assert adapters.load(tmp_path / "run" / "adapters" / f"{row['task']}_joint_8.safetensors").has_ratio(8)
    name = row["task"]
    file.write_text("another text")
    assert train_svd.name_of(str(file)) != name, "what was fitted to another text is not taken for it"


def test_a_training_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch):
    """It gives the adapters of one that was not, and a held-out loss that is not larger than before it."""
    config = make_config("code", steps=5, eval_every=2)
    train_svd.run(config, str(tmp_path / "whole"))
    step, steps = refine_adapters.advance, []

    def stopped(*args):
        steps.append(args)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(refine_adapters, "advance", stopped)
    with pytest.raises(KeyboardInterrupt):
        train_svd.run(config, str(tmp_path / "parts"))
    train_svd.run(config, str(tmp_path / "parts"))
    assert len(steps) == 4 + 3  # two steps were kept, the third is taken again
    whole, parts = (adapters.load(tmp_path / part / "adapters" / "code_joint_8_trained.safetensors")
                    for part in ("whole", "parts"))
    assert whole == parts
    curves = [json.loads((tmp_path / part / "adapters" / "code_joint_8_trained_curve.json").read_text())
              for part in ("whole", "parts")]
    assert curves[0] == curves[1] and [line["step"] for line in curves[0]] == [0, 2, 4, 5]
    assert (tmp_path / "parts" / "training.png").exists()


def test_adapters_are_put_beside_the_model_where_its_methods_find_them(tmp_path):
    """Given that layers share the dimensions, and those that were trained."""
    shutil.copytree(common.REFERENCE, tmp_path / "model", ignore=shutil.ignore_patterns("kvjax"))
    config = make_config("mixed", model=str(tmp_path / "model"), beside=True, steps=2, by_layer=True)
    train_svd.run(config, str(tmp_path / "run"))
    llm = kvjax.load(tmp_path / "model")
    trained = adapters.load(tmp_path / "run" / "adapters" / "mixed_joint_8_trained.safetensors")
    method = llm.with_fitted(kvjax.KVSwap(budget=64, window=8))
    assert method.fitted == trained and len(set(trained.ranks)) > 1
    cache = llm.prefill("A few words, and some more of them, " * 9, method=kvjax.KVSwap(budget=64, window=8))
    assert cache.plan.layers[0].method == method
    assert llm.generate("Go on.", cache, max_new_tokens=2).tokens
    config.update(kinds=("mixed", "code"))
    with pytest.raises(ConfigError, match="one kind"):
        train_svd.run(config, str(tmp_path / "run"))


@pytest.mark.parametrize("change", [
    {"kept": 65}, {"top": 65}, {"top": 0}, {"documents": 0}, {"steps": 1}, {"eval_every": 0}, {"loss": "tokens"},
    {"group": 0}])
def test_impossible_numbers_are_refused(tmp_path, change):
    (tmp_path / "text.txt").write_text("words")
    config = make_config(tmp_path / "text.txt")
    config.update(change)
    with pytest.raises(ConfigError, match="|".join(change)):
        train_svd.run(config, str(tmp_path / "run"))


def test_files_that_cannot_be_used_are_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("too little")
    for config, words in ((make_config(short), "give five times length=64"), (make_config("nowhere.txt"), "text files"),
                          (make_config(short, short), "are the same")):
        with pytest.raises(ConfigError, match=words):
            train_svd.run(config, str(tmp_path / "run"))
