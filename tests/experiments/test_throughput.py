"""What the table of times says about the device under an emulated one."""

import pytest

from experiments import throughput

ROW = {"model": "cache-path", "method": "full", "store": "flash:emmc", "context": 64, "batch": 1, "tokens_per_s": 10.0}


@pytest.mark.parametrize(("share", "said"), [(0.5, True), (0.1, False), (None, False)])
def test_a_device_that_the_host_cannot_keep_up_with_is_named(share, said, capsys):
    throughput.print_table([ROW, {**ROW, "late_share": share} if share is not None else ROW])
    printed = capsys.readouterr().out
    assert ("slower than that device" in printed) == said
    assert share is None or f"{100 * share:.2f}" in printed
