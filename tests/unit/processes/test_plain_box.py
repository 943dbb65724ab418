"""The box ``unsafe``. ``test_box`` tries it beside the others."""

from __future__ import annotations

from os import listdir
from os.path import dirname
from pathlib import Path

import pytest

from rollwright.errors import SandboxError
from rollwright.processes.box import BoxLimits, BoxSpec
from rollwright.processes.boxes import check_box, make_box


def exists(path: str) -> bool:
    return Path(path).exists()


@pytest.fixture
async def box(tmp_path):
    given = tmp_path / "given"
    given.mkdir()
    (given / "file").write_text("content\n")
    box = make_box("unsafe", BoxSpec(readable={"/work/inner/given": given, str(given): given}))
    await box.start()
    yield box
    await box.stop()


async def test_its_directories_are_elsewhere_and_a_commands_words_lead_there(box, tmp_path):
    assert box.workdir.startswith("/tmp/rollwright-box-")
    result = await box.exec(["sh", "-c", 'echo x > "$0"; cat inner/given/file', "/tests/new"], timeout=60)
    assert result.stdout == "content\n"
    await box.download("/tests/new", tmp_path / "new")
    assert (tmp_path / "new").read_text() == "x\n"
    assert not exists("/tests/new")
    result = await box.exec(["cat", str(tmp_path / "given" / "file")], timeout=60)
    assert result.stdout == "content\n"


async def test_reset_empties_its_directories_and_no_others(box, tmp_path):
    await box.exec(["sh", "-c", "mkdir -p a/b; echo x > a/b/c; echo x > $HOME/d"], timeout=60)
    await box.reset()
    assert listdir(box.workdir) == ["inner"]
    assert (tmp_path / "given" / "file").exists()
    assert listdir(box.home) == []


async def test_stop_removes_its_files():
    box = make_box("unsafe", BoxSpec(limits=BoxLimits(processes=20)))
    await box.start()
    place = dirname(box.workdir)
    assert exists(place)
    await box.stop()
    assert not exists(place)


async def test_files_are_where_they_are(tmp_path):
    with pytest.raises(SandboxError, match="cannot be at /opt/given"):
        await make_box("unsafe", BoxSpec(readable={"/opt/given": tmp_path})).start()
    with pytest.raises(SandboxError, match="has no image"):
        make_box("unsafe:debian", BoxSpec())


def test_task_folders_are_refused():
    check_box("unsafe")
    with pytest.raises(SandboxError, match="those of this machine: use bubblewrap, docker or podman"):
        check_box("unsafe", None)
