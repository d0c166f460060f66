"""Made-up keys, and what the table of times says about the device under an emulated one."""

import numpy as np
import pytest

from experiments import made_up, throughput

ROW = {"model": "cache-path", "method": "full", "store": "flash:emmc", "context": 64, "batch": 1, "tokens_per_s": 10.0}


@pytest.mark.parametrize(("share", "said"), [(0.5, True), (0.1, False), (None, False)])
def test_a_device_that_the_host_cannot_keep_up_with_is_named(share, said, capsys):
    throughput.print_table([ROW, {**ROW, "late_share": share} if share is not None else ROW])
    printed = capsys.readouterr().out
    assert ("slower than that device" in printed) == said
    assert share is None or f"{100 * share:.2f}" in printed


@pytest.mark.parametrize(("run", "alike"), [(1.0, 1 / 256), (4.0, 0.75)])
def test_neighbouring_made_up_keys_are_of_one_clump_as_often_as_asked(run, alike):
    key = np.asarray(made_up.keys(made_up.shape("cache-path"), 4000, 0, run)[0])[0].reshape(4000, -1)
    apart = np.square(key[1:] - key[:-1]).mean(-1)  # twice the noise within a clump, 2 more between clumps
    assert abs((apart < 1.3).mean() - alike) < 0.03
