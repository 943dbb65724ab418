"""Servers of this machine: what cannot be started leaves nothing behind."""

import fcntl
import os

import pytest

from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import SGLangConfig
from rollwright.errors import ConfigError, WeightUpdateError
from rollwright.inference.weights import group
from rollwright.placement import local_servers
from rollwright.placement.local_servers import LocalServers


@pytest.mark.parametrize(
    ("backend", "said"), [("builtin", "has no servers to start"), ("vllm", "has no model"), ("sglang", "has no model")]
)
def test_what_cannot_be_started_leaves_no_directory(backend, said, tmp_path, monkeypatch):
    monkeypatch.setattr(local_servers, "_SHARED_MEMORY", tmp_path)
    with pytest.raises(ConfigError, match=said):
        LocalServers(RolloutConfig(backend=backend), model_path="", logs=tmp_path / "logs")
    assert not list(tmp_path.glob("rollwright-*"))


def test_what_the_built_in_engine_cannot_do_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(local_servers, "_SHARED_MEMORY", tmp_path)
    section = SGLangConfig(implementation="builtin", model_path="some/model")
    with pytest.raises(ConfigError, match="no tensor parallelism"):
        LocalServers(RolloutConfig(backend="sglang"), model_path="", logs=tmp_path / "logs", sglang=section, tensor_parallel=2)
    assert not list(tmp_path.glob("rollwright-*"))


def test_servers_with_another_nccl_are_not_started_for_broadcasts(tmp_path, monkeypatch):
    monkeypatch.setattr(local_servers, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(group, "nccl_version", lambda: "2.28.9")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 2.27.5\n")
    python.chmod(0o755)
    section, logs = SGLangConfig(model_path="some/model", python=str(python)), tmp_path / "logs"
    with pytest.raises(WeightUpdateError, match=f"2.27.5 in the environment of {python}"):
        LocalServers(RolloutConfig(backend="sglang", weight_update="xccl"), model_path="", logs=logs, sglang=section)
    assert not logs.exists()


def test_what_a_killed_process_shared_is_removed_and_nothing_else(tmp_path):
    for name in ("killed", "lives", "other"):
        (tmp_path / f"rollwright-{name}").mkdir()
        if name != "other":
            (tmp_path / f"rollwright-{name}" / "owned").touch()
    with (tmp_path / "rollwright-lives" / "owned").open("w") as owned:
        fcntl.flock(owned, fcntl.LOCK_EX)
        local_servers.remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollwright-lives", "rollwright-other"]


def test_a_directory_that_never_got_its_name_is_removed_when_nobody_can_be_making_it(tmp_path):
    left, made = tmp_path / ".rollwright-left", tmp_path / ".rollwright-made"
    for path in (left, made):
        path.mkdir()
        (path / "owned").touch()
    os.utime(left, (1.0, 1.0))
    local_servers.remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [made]


def test_what_another_user_put_there_is_not_touched(tmp_path, monkeypatch):
    (tmp_path / ".rollwright-draft").mkdir()
    os.utime(tmp_path / ".rollwright-draft", (1.0, 1.0))
    (tmp_path / "rollwright-theirs").mkdir()
    (tmp_path / "rollwright-theirs" / "owned").touch()
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    local_servers.remove_abandoned(tmp_path)
    assert (tmp_path / "rollwright-theirs" / "owned").exists()
    assert (tmp_path / ".rollwright-draft").exists()
