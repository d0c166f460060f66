"""Bad input on the command line: one line, exit code 2, no traceback, nothing written."""

import errno
import subprocess
import sys
import types

import pytest
from absl import flags
from ml_collections import config_flags

from experiments import main

CASES = {
    "unknown_field": ("configs/demo.py:smoke", "--config.nosuch=1", "unknown field 'nosuch'"),
    "unknown_preset": ("configs/demo.py:nope", "", "unknown preset"),
    "no_model": ("configs/demo.py:smoke", "--config.model=/nowhere", "/nowhere"),
    "no_methods": ("configs/demo.py:smoke", "--config.methods=()", "methods is empty"),
    "unknown_method": ("configs/evaluate.py:smoke", "--config.methods=({'name':'nope'},)", "unknown method 'nope'"),
    "unknown_layout": ("configs/layouts.py:smoke", "--config.layouts=('nope',)", "unknown layout 'nope'"),
    "no_prompt_file": ("configs/demo.py:smoke", "--config.prompt_file=/nofile", "/nofile"),
    "question_alone": ("configs/demo.py:smoke", "--config.question=why", "prompt_file"),
    "small_budget": ("configs/demo.py:smoke", "--config.methods=({'name':'dynakv','budget':8},)", "budget=8"),
    "small_context": ("configs/demo.py:smoke", "--config.context=5", "do not fit in 5 tokens"),
    "unknown_experiment": ("configs/demo.py:smoke", "--config.experiment=nosuch", "no experiment 'nosuch'"),
    "no_settings": ("configs/demo.py:smoke", "--config.methods=('quest',)", "'quest' is not a method"),
    "budget_as_text": ("configs/demo.py:smoke", "--config.methods=({'name':'quest','budget':'64'},)", "budget='64'"),
    "unreadable_file": ("configs/demo.py:smoke", "--config.prompt_file=/proc/self/mem", "cannot be read"),
    "no_needles": ("configs/demo.py:smoke", "--config.needles=()", "needles is empty"),
    "negative_chunk": ("configs/demo.py:smoke", "--config.chunk=-1", "chunk=-1"),
    "no_answer": ("configs/demo.py:smoke", "--config.max_new_tokens=-5", "max_new_tokens=-5"),
    "no_chunks": ("configs/demo.py:smoke", "--config.chunk=16 --config.methods=({'name':'h2o'},)", "single tokens"),
    "no_room": ("configs/evaluate.py:smoke", "--config.methods=({'name':'quest','budget':8},)", "budget=8"),
    "no_tokenizer": ("configs/train_lm.py:smoke", "--config.tokenizer=/nowhere.json", "tokenizer=/nowhere.json"),
    "value_not_quoted": ("configs/demo.py:smoke", "--config.question=what is it", "unexpected argument 'is'"),
    "unknown_device": ("configs/overlap.py:smoke", "--config.devices=('tape',)", "config.devices has unknown 'tape'"),
    "unknown_tree": ("configs/icecache_paper.py:smoke", "--config.trees=('oak',)", "config.trees has unknown 'oak'"),
    "no_repeats": ("configs/icecache_paper.py:smoke", "--config.repeats=0", "repeats=0"),
    "unknown_timed": ("configs/icecache_paper.py:smoke", "--config.timed=('ice',)", "config.timed has unknown 'ice'"),
    "unknown_store": ("configs/demo.py:smoke", "--config.store=disk", "unknown store 'disk'"),
}


@pytest.mark.parametrize(("config", "flag", "words"), CASES.values(), ids=CASES)
@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, config, flag, words):
    argv = ["main", f"--config={config}", f"--workdir={tmp_path}/run", *flag.split()]
    values = flags.FlagValues()
    monkeypatch.setattr(sys, "argv", argv)  # where ml_collections looks for fields of the configuration
    monkeypatch.setattr(main, "_CONFIG", config_flags.DEFINE_config_file("config", None, "", flag_values=values))
    monkeypatch.setattr(main, "_WORKDIR", flags.DEFINE_string("workdir", None, "", flag_values=values))
    monkeypatch.setattr(main.flags, "FLAGS", values)
    monkeypatch.setattr(main, "keep_programs", lambda: None)  # which is for the whole process, as is the next
    monkeypatch.setattr(main.logging, "set_verbosity", lambda level: None)
    with pytest.raises(SystemExit) as ended:
        main.run(main.parse(argv))
    assert ended.value.code == 2 and words in the_error(capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def the_error(text) -> str:
    """The one line of an error."""
    (line,) = (line for line in text.splitlines() if line.startswith("error: "))
    return line


def refusal_of(config, flag, workdir) -> str:
    """The one line with which a command ends that was given bad input."""
    command = [sys.executable, "-m", "experiments.main", f"--config={config}", f"--workdir={workdir}"]
    done = subprocess.run([*command, *flag.split()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr + done.stdout
    return the_error(done.stderr)


@pytest.mark.parametrize("name", ["unknown_field", "no_model"])
def test_a_command_with_bad_input_ends_with_one_line(tmp_path, name):
    """Whether the flags or the experiment tell."""
    config, flag, words = CASES[name]
    assert words in refusal_of(config, flag, tmp_path / "run")


def test_a_file_in_the_place_of_the_store_is_named(tmp_path):
    (tmp_path / "store").touch()
    assert f"{tmp_path}/store" in refusal_of("configs/demo.py:smoke", "--config.chunk=64", tmp_path)


@pytest.mark.parametrize(("error", "ends"), [
    (OSError(errno.ENOSPC, "No space left on device"), SystemExit), (PermissionError(errno.EACCES, "no"), SystemExit),
    (FileNotFoundError(errno.ENOENT, "no"), FileNotFoundError), (OSError(errno.EBADF, "closed"), OSError),
    (OSError("of a library"), OSError), (KeyError("name"), KeyError),
])
def test_what_a_disk_refuses_is_one_line_and_mistakes_are_tracebacks(monkeypatch, capsys, error, ends):
    def experiment(config, workdir):
        raise error

    monkeypatch.setattr(main.logging, "set_verbosity", lambda level: None)  # which other tests would have, too
    monkeypatch.setattr(main, "_CONFIG", types.SimpleNamespace(value=types.SimpleNamespace(experiment="demo")))
    monkeypatch.setattr(main, "_WORKDIR", types.SimpleNamespace(value="unused"))
    monkeypatch.setattr(main, "_experiment", lambda name: experiment)
    with pytest.raises(ends):
        main.run(["main"])
    assert capsys.readouterr().err.startswith(f"error: {error}; ") == (ends is SystemExit)
