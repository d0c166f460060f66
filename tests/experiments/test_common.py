"""Stores by name, and what a row of results says about the device under them."""

import pytest

import kvjax
from experiments import common
from kvjax.errors import ConfigError


def test_stores_by_name(tmp_path):
    assert common.make_store("memory", tmp_path) is None
    assert isinstance(common.make_store("host", tmp_path), kvjax.HostStore)
    assert common.make_store("flash", tmp_path / "new").profile == "native" and (tmp_path / "new").is_dir()
    store = common.make_store("flash:emmc", tmp_path)
    assert (store.profile, store.layout) == ("emmc", "grouped")
    store = common.make_store("flash:emmc:sequential", tmp_path)
    assert (store.profile, store.layout) == ("emmc", "sequential")


@pytest.mark.parametrize("kind", ["disk", "", "host:emmc", "flash:floppy", "flash:emmc:spiral", "flash:emmc:grouped:x"])
def test_unknown_stores_are_refused_and_make_nothing(tmp_path, kind):
    with pytest.raises(ConfigError, match="unknown"):
        common.make_store(kind, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_results_say_what_was_emulated(tmp_path):
    assert common.disk_of(None) == common.disk_of(kvjax.HostStore()) == {}
    assert common.disk_of(common.make_store("flash", tmp_path)) == {"disk": "native"}
    assert common.disk_of(common.make_store("flash:emmc", tmp_path)) == {"disk": "emmc (emulated)", "late_share": 0.0}


def test_late_commands_are_those_since_a_moment(tmp_path):
    store = common.make_store("flash:emmc", tmp_path)
    store.system.commands, store.system.late = 10, 4
    since = common.commands_of(store)
    store.system.commands, store.system.late = 30, 9
    assert common.disk_of(store, since)["late_share"] == 5 / 20
    assert common.commands_of(None) == common.commands_of(common.make_store("flash", tmp_path)) == (0, 0)
