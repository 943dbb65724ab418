"""Files and directories written whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from rollwright import atomic


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    assert atomic.write_text(path, "one") == path
    atomic.write_text(path, "zwei ⟦2⟧", durable=True)
    assert path.read_text("utf-8") == "zwei ⟦2⟧"
    with atomic.replaced_file(path) as draft:
        draft.write_bytes(b"\x00")
    assert path.read_bytes() == b"\x00"
    assert os.listdir(path.parent) == ["file.txt"]


def test_json_ends_with_a_newline(tmp_path: Path) -> None:
    path = atomic.write_json(tmp_path / "a.json", {"path": Path("x"), "n": [1]}, default=str)
    assert json.loads(path.read_text()) == {"path": "x", "n": [1]}
    assert path.read_text().endswith("\n")


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = atomic.write_text(tmp_path / "file", "old")
    with pytest.raises(RuntimeError), atomic.replaced_file(path) as draft:
        raise RuntimeError(draft.write_text("half"))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_gets_the_mode_asked_for(tmp_path: Path) -> None:
    path = atomic.write_text(tmp_path / "secret", "key", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("durable", [True, False])
def test_a_directory_is_replaced_as_a_whole(tmp_path: Path, durable: bool) -> None:
    target = tmp_path / "step_1"
    for content in ("one", "two"):
        with atomic.replaced_directory(target, durable=durable) as draft:
            (draft / "inner").mkdir()
            (draft / "inner" / content).write_text(content)
            assert not (target / "inner" / content).exists()
    assert os.listdir(target / "inner") == ["two"]
    assert os.listdir(tmp_path) == ["step_1"]


def test_a_directory_does_not_appear_where_the_last_check_fails(tmp_path: Path) -> None:
    def refuse() -> None:
        raise OSError("the store is full")

    with pytest.raises(OSError, match="full"), atomic.replaced_directory(tmp_path / "x", before_visible=refuse) as draft:
        (draft / "a").write_text("a")
    assert os.listdir(tmp_path) == []


def test_sweep_removes_old_leftovers_only(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic.replaced_file(tmp_path / "file") as draft:
        raise KeyboardInterrupt
    leftover_file, leftover_directory = draft, tmp_path / ".step.0123abcd.tmp"
    leftover_directory.mkdir()
    (leftover_directory / "half").write_text("half")
    for path in (leftover_file, tmp_path / ".users.tmp", tmp_path / "file"):
        path.write_text("kept")
    assert atomic.sweep(tmp_path) == []
    assert set(atomic.sweep(tmp_path, older_than=-1.0)) == {leftover_file, leftover_directory}
    assert sorted(os.listdir(tmp_path)) == [".users.tmp", "file"]
    assert atomic.sweep(tmp_path / "missing") == []
