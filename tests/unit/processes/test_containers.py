"""Containers of docker and podman: how jails and boxes are started in them, and that they work where one of the programs does.

``test_box`` and ``test_box_escapes`` try the boxes on all kinds. ROLLWRIGHT_TEST_IMAGE names another image than the default.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from rollwright.errors import SandboxError
from rollwright.processes import containers
from rollwright.processes.box import BoxLimits, BoxSpec
from rollwright.processes.boxes import check_box, make_box
from rollwright.processes.sandbox import SandboxLimits, close_jails, make_sandbox, run_python, sandboxed
from tests.conftest import usable_box, usable_sandbox

CLOSED_OFF = ("--network=none", "--cap-drop=ALL", "--read-only", "--pull=never", "--security-opt=no-new-privileges", "--rm")
OF_PODMAN = ("--read-only-tmpfs=false", "--image-volume=ignore", "--http-proxy=false")

PROGRAM = """#!/bin/sh
case "$1" in
  rm) ;;
  *) for word; do echo "$word"; done > LOG; echo "no such image" >&2; exit 125 ;;
esac
"""


@pytest.fixture
def started_with(tmp_path, monkeypatch):
    """A docker and a podman that start nothing; returns the words that the last one was called with."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("docker", "podman"):
        (directory / name).write_text(PROGRAM.replace("LOG", str(tmp_path / "log")))
        (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    return lambda: (tmp_path / "log").read_text().splitlines()


@pytest.fixture
def temporary(monkeypatch):
    """An empty directory for temporary files, whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield directory


# -- how they are started ----------------------------------------------------------------------------------------------


def test_a_jail_is_closed_off_and_bounded(monkeypatch):
    commands = []
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(containers, "Jail", lambda command, *rest, **options: commands.append(command))
    make_sandbox("podman:my/image:1").start(SandboxLimits(disk_bytes=12345))
    [command] = commands
    for option in (*CLOSED_OFF, *OF_PODMAN, "--user=65534:65534", "--tmpfs=/tmp:size=12345,mode=1777,exec,notmpcopyup"):
        assert option in command
    assert command[0] == "/bin/podman"
    at = command.index("my/image:1")
    assert command[at - 1 : at + 2] == ["--entrypoint=python3", "my/image:1", "-I"]


@pytest.mark.parametrize("kind", ["docker", "podman"])
async def test_a_box_is_closed_off_and_bounded(kind, started_with, temporary, tmp_path, monkeypatch):
    given, odd = tmp_path / "given", tmp_path / 'odd,"name'
    for each in (given, odd):
        each.mkdir()
    limits = BoxLimits(memory_bytes=2**30, disk_bytes=2**20, processes=50)
    spec = BoxSpec(limits=limits, writable=("/w", "/h"), readable={"/opt/given": given, "/opt/odd": odd})
    with pytest.raises(SandboxError, match=rf"{kind} says 'no such image'; does '{kind} run --rm my/image:1 python3 -V' work"):
        await make_box(f"{kind}:my/image:1", spec).start()
    monkeypatch.setattr(tempfile, "tempdir", str(long := tmp_path / ("long" * 20)))
    long.mkdir()
    with pytest.raises(SandboxError, match="is the path of TMPDIR longer"):
        await make_box(kind, spec).start()
    assert os.listdir(temporary) == os.listdir(long) == []
    command = started_with()
    memory = 2**30 + 2**20 + 64 * 2**20 + 2**28
    for option in (*CLOSED_OFF, f"--memory={memory}", f"--memory-swap={memory}", "--pids-limit=82"):
        assert option in command
    allowed = [word for word in command if word.startswith("--cap-add")]
    assert allowed == [f"--cap-add={name}" for name in ("CHOWN", "SETGID", "SETUID", "SETPCAP")]  # to become another user
    assert [each in command for each in OF_PODMAN] == [kind == "podman"] * 3
    assert "--tmpfs=/w:size=1048576,mode=1777,exec" + (",notmpcopyup" if kind == "podman" else "") in command
    assert f"--mount=type=bind,source={given},target=/opt/given,readonly" in command
    assert f'--mount=type=bind,"source={tmp_path}/odd,""name",target=/opt/odd,readonly' in command
    assert command[command.index("my/image:1") - 1] == "--entrypoint=python3"
    assert {"for path in ['/w', '/h']: os.chown(path, 1000, 1000)", "os.setresuid(1000, 1000, 1000)"} < set(command)
    assert command[-1] == "/run/rollwright/server/server.sock"


async def test_a_box_with_the_network_and_the_specs_image(started_with):
    with pytest.raises(SandboxError, match="no such image"):
        await make_box("docker:other", BoxSpec(network=True, image="mine")).start()
    assert {"--network=bridge", "mine"} < set(started_with())
    with pytest.raises(SandboxError, match=r"python:3\.12-slim python3"):
        await make_box("docker", BoxSpec()).start()


async def test_what_the_user_of_a_container_cannot_use_is_refused(started_with, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o700)
    with pytest.raises(SandboxError, match=r"may not read .*/closed: allow it \(chmod o\+rX\)"):
        await make_box("docker", BoxSpec(readable={"/given": tmp_path / "closed"})).start()
    async with await asyncio.start_unix_server(lambda *_: None, tmp_path / "own.sock"):
        os.chmod(tmp_path / "own.sock", 0o755)
        with pytest.raises(SandboxError, match=r"may not connect to .*/own\.sock"):
            await make_box("podman", BoxSpec(ports={8000: tmp_path / "own.sock"})).start()


def test_what_is_missing_is_named(started_with, monkeypatch):
    with pytest.raises(SandboxError, match="docker does not answer"):
        check_box("docker", None)
    with pytest.raises(SandboxError, match=r"does 'podman run --rm mine python3 -V' work"):
        check_box("podman", "mine")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for image in (None, "", "mine"):
        with pytest.raises(SandboxError, match=r"docker is not installed: install it, or set rollout\.sandbox to bubblewrap"):
            check_box("docker", image)


# -- whether it works --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["docker", "podman"])
async def test_a_container_holds_what_a_jail_holds(program):
    with sandboxed(usable_sandbox(program)):
        assert (await run_python("print(input())", "read")).stdout == "read\n"
        assert "Operation not permitted" in (await run_python("import os; os.fork()")).stderr
        assert "Network is unreachable" in (await run_python("import socket; socket.create_connection(('1.1.1.1', 80))")).stderr
        assert "Read-only file system" in (await run_python("open('/usr/new', 'w')")).stderr
        assert (await run_python("while True: pass", timeout=0.5)).timed_out
        assert (await run_python("import os; print(os.listdir())")).stdout == "['main.py']\n"
    close_jails()


@pytest.mark.parametrize("program", ["docker", "podman"])
async def test_a_directory_that_the_image_has_is_empty_and_the_users_own(program):
    box = make_box(usable_box(program), BoxSpec(writable=("/home", "/tmp")))
    await box.start()
    try:
        result = await box.exec(["sh", "-c", "ls -A; touch new && echo done"], timeout=60)
        assert (result.stdout, result.stderr) == ("done\n", "")
    finally:
        await box.stop()


def ours(program: str) -> set[str]:
    """The containers of this package that a program has."""
    listed = subprocess.run([program, "ps", "--all", "--format={{.Names}}"], capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split() if name.startswith("rollwright-")}


@pytest.mark.parametrize("program", ["docker", "podman"])
async def test_no_container_is_left(program):
    """Not after a box has ended, nor after the process that started it was killed."""
    name = usable_box(program)
    list_ours = functools.partial(asyncio.to_thread, ours, program)
    before = await list_ours()
    box = make_box(name, BoxSpec())
    await box.start()
    assert len(await list_ours() - before) == 1
    await box.stop()
    assert await list_ours() <= before
    code = f"""
        import asyncio
        from rollwright.processes.box import BoxSpec
        from rollwright.processes.boxes import make_box
        async def main():
            box = make_box({name!r}, BoxSpec())
            await box.start()
            print("started", flush=True)
            await box.exec(["sleep", "3600"], timeout=3600)
        asyncio.run(main())
    """
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(code), stdout=subprocess.PIPE)
    assert await run.stdout.readline() == b"started\n"
    run.kill()
    await run.wait()
    deadline = time.monotonic() + 30
    while await list_ours() - before:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
