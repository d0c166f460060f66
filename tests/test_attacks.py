"""Attacks on saved caches end in right tokens or in typed errors (`scripts/attack_saves.py`)."""

import warnings

import pytest

from scripts import attack_saves


def attack(tmp_path, share: float, kinds) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return attack_saves.run(tmp_path, share, kinds)


def test_a_few_attacks(tmp_path):
    counts = attack(tmp_path, 0.01, ("aio",))
    assert attack_saves.failed(counts) == 0, attack_saves.table(counts)
    assert sum(count["right"] for count in counts.values()) and sum(count["typed"] for count in counts.values())


@pytest.mark.slow
def test_all_attacks(tmp_path, capsys):
    counts = attack(tmp_path, 1.0, attack_saves.KINDS)
    with capsys.disabled():
        print("\n" + "\n".join(attack_saves.table(counts)))
    assert attack_saves.failed(counts) == 0
    tries = {attack: sum(count.total() for (_, name), count in counts.items() if name == attack)
             for attack in {name for _, name in counts}}
    assert tries["processes killed"] >= 200 and tries["bits of state and blocks"] >= 2000
