"""The Python of docs/boxes.md. ``ssh`` is a program that runs the line on this machine, as the real one has a shell of another run it."""

from __future__ import annotations

import ast
import asyncio
import os
import re
from pathlib import Path

import pytest

from rollwright.errors import RefusedFilesError, SandboxError
from rollwright.processes.box import BoxSpec
from rollwright.processes.boxes import BOXES, make_box

PAGE = Path(__file__).parents[3] / "docs" / "boxes.md"
IN_PYTHON, OF_YOUR_OWN = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
SSH = """#!/bin/sh
[ "$1" = -N ] && exec sleep 600
[ "$1" = agents ] && exec sh -c "$2"
echo "ssh: $1" >&2; exit 255
"""


async def test_a_box_is_used(bubblewrap, tmp_path):
    code = compile(IN_PYTHON, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, {"folder": tmp_path})  # noqa: S307 - the documentation's own code
    assert (tmp_path / "answer").read_text() == "42\n"


@pytest.fixture
async def box(tmp_path, monkeypatch):
    """The page's own kind of box, on directories of this test."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    exec(OF_YOUR_OWN, {})
    box = make_box("ssh", BoxSpec(writable=(f"{tmp_path}/far/work dir", f"{tmp_path}/far/home")))
    try:
        await box.start()
        yield box
    finally:
        await box.stop()
        del BOXES["ssh"]
    assert os.listdir(tmp_path / "far") == []
    assert box.tunnel.returncode is not None


async def test_a_box_of_your_own_runs_commands(box):
    result = await box.exec(["sh", "-c", "cat; pwd; echo $HOME; echo wrong >&2; exit 3"], timeout=60, stdin="given\n")
    assert (result.stdout, result.stderr, result.exit_code) == (f"given\n{box.workdir}\n{box.home}\n", "wrong\n", 3)
    late = await box.exec(["sleep", "60"], timeout=0.2)
    assert (late.exit_code, late.excess) == (None, "time")
    assert box.url(8000) == "http://127.0.0.1:8000"


async def test_a_box_of_your_own_copies_files(box, tmp_path):
    (tmp_path / "task" / "inner").mkdir(parents=True)
    (tmp_path / "task" / "inner" / "a file").write_text("content")
    await box.upload(tmp_path / "task", box.workdir)
    await box.upload(tmp_path / "task" / "inner" / "a file", f"{box.home}/new/b file")
    assert (await box.exec(["sh", "-c", "cat inner/*; cat $HOME/new/*"], timeout=60)).stdout == "content" * 2
    await box.download(box.workdir, tmp_path / "out")
    await box.download(f"{box.home}/new/b file", tmp_path / "one")
    assert (tmp_path / "out" / "inner" / "a file").read_text() == (tmp_path / "one").read_text() == "content"
    await box.exec(["ln", "-s", "/etc/passwd", "evil"], timeout=60)
    for source in (box.workdir, f"{box.home}/nothing"):
        with pytest.raises(RefusedFilesError):
            await box.download(source, tmp_path / "refused")
    with pytest.raises(RefusedFilesError, match="was not written"):
        await box.upload(tmp_path / "task", f"{box.home}/new/b file/inner")
    assert not await asyncio.to_thread((tmp_path / "refused").exists)


async def test_a_machine_that_is_not_reached_is_the_boxs_fault(box, tmp_path):
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\necho 'no route to host' >&2; exit 255\n")
    other = make_box("ssh", box.spec)
    with pytest.raises(SandboxError, match="no route to host"):
        await other.start()
    await other.tunnel.wait()
    (tmp_path / "bin" / "ssh").write_text(SSH)
