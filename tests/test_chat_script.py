"""scripts/chat.py: three commands from a clone to a streamed answer."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import kvjax

ROOT = pathlib.Path(__file__).parent.parent
REFERENCE = pathlib.Path(kvjax.__file__).parent / "reference"


def test_a_document_is_talked_about_and_the_talk_goes_on(tmp_path):
    """With a model that has a chat template, twice; the second time the document is not read again."""
    model = tmp_path / "model"
    shutil.copytree(REFERENCE, model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    document = tmp_path / "document.txt"
    document.write_text("The block is read, then written. " * 20 + "\nThe pass key is 29318.\n" + "It is kept. " * 20)
    command = [sys.executable, "scripts/chat.py", f"--document={document}", f"--store={tmp_path / 'blocks'}",
               "--max_new_tokens=6", "--dtype=float32", "--method=quest"]
    environment = {**os.environ, "HOME": str(tmp_path)}

    def talk(*more, said=None):
        return subprocess.run([*command, *more], cwd=ROOT, env=environment, input=said, capture_output=True, text=True)

    for turn in range(2):
        done = talk(f"--model={model}", f"--save={tmp_path / 'talk'}", "--question=The pass key is")
        assert done.returncode == 0 and "29318" in done.stdout, done.stderr
        assert ("goes on" in done.stderr) == bool(turn) and "MiB" in done.stderr
    assert len(json.loads((tmp_path / "talk" / "chat.json").read_text())["messages"]) == 4
    done = talk(said="The pass key is\n\n")
    assert done.returncode == 0 and "29318" in done.stdout and "no chat template" in done.stderr
    done = talk(f"--model={tmp_path}")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: ")
    assert list((tmp_path / "blocks").iterdir()) == []
