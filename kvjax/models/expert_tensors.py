"""Tensors of experts in the forms that files have: one of each expert, all of a layer in one, and these transposed."""

import itertools
import re

import numpy as np

from kvjax.models import tensor_file
from kvjax.models.config import ModelConfig
from kvjax.models.tensor_file import StoredTensor
from kvjax.models.tensor_names import EXPERTS, USUAL_EXPERTS, Target, check_tensor

# What transformers 5 has in memory, and so in files that it wrote without going back to the names of earlier versions.
_STACKED = re.compile(r"(?P<layer>(model\.)?layers\.\d+)\.mlp\.(experts\.(?P<map>gate_up_proj|down_proj)|gate\.weight)")
# GPT-OSS's, transposed: the columns of gate and up alternate.
_TRANSPOSED = re.compile(
    r"(?P<layer>(model\.)?layers\.\d+)\.mlp\.experts\.(?P<map>gate_up_proj|down_proj)(?P<bias>_bias)?")


def expert_by_expert(held: dict[str, list[StoredTensor]], config: ModelConfig) -> dict[str, list[StoredTensor]]:
    """Returns tensors of which each is of one expert, under the names that earlier versions of transformers gave them.

    Raises:
      CheckpointError: a tensor that stacks the experts' is misshapen or of a type that is not supported.
    """
    mixture, hidden = config.experts, config.hidden_size
    if mixture is None:
        return held
    if config.family == "gpt_oss":
        return _transposed_experts(held, config)
    module, (gate, up, down) = EXPERTS.get(config.family, USUAL_EXPERTS)
    apart: dict[str, list[StoredTensor]] = {}
    for name, sources in held.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            apart.setdefault(name, []).extend(sources)
        elif match["map"] is None:
            apart.setdefault(f"{match['layer']}.{module}.gate.weight", []).extend(sources)
        else:
            names = (gate, up) if match["map"] == "gate_up_proj" else (down,)
            shape = (mixture.size, hidden) if len(names) == 2 else (hidden, mixture.size)
            for stored in sources:
                tensor_file.check_plain(stored)
                check_tensor(stored, Target((), (mixture.count, len(names) * shape[0], shape[1]), ()))
                part = stored._replace(shape=shape)
                for i in range(mixture.count * len(names)):
                    one = f"{match['layer']}.{module}.experts.{i // len(names)}.{names[i % len(names)]}.weight"
                    apart.setdefault(one, []).append(part._replace(offset=stored.offset + i * part.nbytes))
    return apart


def _transposed_experts(held: dict[str, list[StoredTensor]], config: ModelConfig) -> dict[str, list[StoredTensor]]:
    """Returns the tensors of GPT-OSS's files, those of experts one by one; raises CheckpointError as the caller."""
    mixture, hidden = config.experts, config.hidden_size
    assert mixture is not None
    apart: dict[str, list[StoredTensor]] = {}
    for name, sources in held.items():
        match = _TRANSPOSED.fullmatch(name)
        if match is None:
            apart.setdefault(name, []).extend(sources)
            continue
        names = ("gate_proj", "up_proj") if match["map"] == "gate_up_proj" else ("down_proj",)
        outer, inner = (mixture.size, hidden) if len(names) == 2 else (hidden, mixture.size)
        shape, kind = ((outer,), "bias") if match["bias"] else ((outer, inner), "weight")
        for stored in sources:
            tensor_file.check_plain(stored)
            check_tensor(stored, Target((), (mixture.count, *shape[1:], len(names) * outer), ()))
            for i, (first, one) in itertools.product(range(mixture.count), enumerate(names)):
                part = stored._replace(shape=shape, every=(first, len(names)))
                apart.setdefault(f"{match['layer']}.mlp.experts.{i}.{one}.{kind}", []).append(
                    part._replace(offset=stored.offset + i * part.nbytes))
    return apart


def in_files(tensors: dict[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Returns tensors as files have them: GPT-OSS's have those of all experts in one, transposed."""
    if config.family != "gpt_oss" or config.experts is None:
        return tensors
    count = config.experts.count
    written = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer, (kind, end) in itertools.product(range(config.num_layers), (("weight", ""), ("bias", "_bias"))):
        module = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (np.stack([tensors[f"{module}.{i}.{name}.{kind}"].T for i in range(count)])
                          for name in ("gate_proj", "up_proj", "down_proj"))
        both = np.stack([gate, up], axis=-1)
        written[f"{module}.gate_up_proj{end}"] = both.reshape(*both.shape[:-2], -1)
        written[f"{module}.down_proj{end}"] = down
    return written
