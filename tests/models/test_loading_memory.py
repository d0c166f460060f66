"""The memory that loading takes: the model in the type that is asked for, and one tensor."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

import kvjax
from kvjax.models import hf_config, tensor_names
from kvjax.models.config import Experts, ModelConfig

SMALL = ModelConfig(
    family="llama", vocab_size=20, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=4,
)
LARGE = dataclasses.replace(
    SMALL, vocab_size=8_000, hidden_size=1024, intermediate_size=2816, num_layers=4, num_heads=16, head_dim=64,
    windows=(),
)
MIXTURE = dataclasses.replace(LARGE, family="qwen3_moe", qk_norm=True, experts=Experts(8, 2, 352))
SLACK = 16 << 20  # bytes: pieces of a tensor, and what the allocator keeps
CHILD = """
import json, sys
from kvjax.models import checkpoint, hf_config

def load(directory, dtype):
    kind = dtype if dtype.startswith("int") else None
    return checkpoint.find(directory, hf_config.read_config(directory)).read("float32" if kind else dtype, kind=kind)

def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))

small, large, dtype = sys.argv[1:]
load(small, dtype)  # whatever is made once
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is what is there now
before = memory("VmRSS")
params = load(large, dtype)
print(json.dumps({"peak": memory("VmHWM") - before}))
"""


def written(directory, config):
    """The directory with a checkpoint in f32, and the numbers in it and in its largest tensor."""
    directory.mkdir()
    hf_config.write_config(config, directory, "float32")
    shapes = {name: target.shape for name, target in tensor_names.targets_of(config).items()}
    save_file({name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()},
              directory / "model.safetensors")
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    return directory, sum(sizes), max(sizes)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is in /proc")
@pytest.mark.parametrize("config, dtype, width", [
    (LARGE, "bfloat16", 2), (LARGE, "float32", 4), (LARGE, "int8", 1), (LARGE, "int4", 0.68),
    (MIXTURE, "bfloat16", 2), (MIXTURE, "float32", 4),
])
def test_a_model_and_one_tensor_are_in_memory(tmp_path, config, dtype, width):
    small, *_ = written(tmp_path / "small", SMALL)
    large, size, largest = written(tmp_path / "large", config)
    assert 4 * size > 180 << 20
    root = pathlib.Path(kvjax.__file__).parents[1]
    run = subprocess.run([sys.executable, "-P", "-c", CHILD, small, large, dtype], check=True, capture_output=True,
                         text=True, env={"PYTHONPATH": str(root), "PATH": "", "JAX_PLATFORMS": "cpu"})
    peak = json.loads(run.stdout)["peak"]
    assert width * size < peak < width * (size + largest) + SLACK
