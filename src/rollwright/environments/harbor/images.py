"""Which box a task gets: that of the run, or a container if the task needs an image and docker or podman works here."""

from __future__ import annotations

import asyncio
import atexit
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rollwright.environments.harbor.dockerfile import Need
from rollwright.environments.harbor.folder import TaskFolder
from rollwright.errors import DataError, SandboxError
from rollwright.processes.boxes import UNSAFE_FOLDERS
from rollwright.processes.containers import CONTAINERS, check_container


def working_container() -> str:
    """Return ``docker`` or ``podman``, whichever answers first, or an empty string."""
    return next((kind for kind in CONTAINERS if not why_unusable(kind)), "")


@functools.cache
def why_unusable(kind: str) -> str:
    """Return why ``docker`` or ``podman`` cannot be used here; empty if it answers."""
    try:
        check_container(kind)
    except SandboxError as error:
        return str(error)
    return ""


def refuse_needs(folder: TaskFolder, sandbox: str = "") -> None:
    """Refuse a task that needs what this machine does not have.

    Args:
        folder: the task.
        sandbox: kind of box, as in ``rollout.sandbox``; empty for bubblewrap, or a container if the task needs one.

    Raises:
        DataError: names each need with its line.
    """
    faults = [
        f"{need.where}: {need.what} is not run here; put all into one Dockerfile."
        for need in folder.needs
        if need.what.startswith("docker compose")
    ]
    cpus, present = folder.environment.cpus or 0, os.cpu_count() or 1
    if cpus > present:
        faults.append(f"{folder.path / 'task.toml'}: environment.cpus asks for {cpus:g}, and this machine has {present}.")
    if sandbox == "unsafe":
        faults.append(f"{folder.path}: {UNSAFE_FOLDERS}")
    elif not faults and not _can_do(folder, sandbox):
        faults = [_told(need, sandbox.partition(":")[0] or "bubblewrap") for need in folder.needs]
    if faults:
        raise DataError("\n  ".join(faults))


def _can_do(folder: TaskFolder, sandbox: str) -> bool:
    kind = sandbox.partition(":")[0]
    if not folder.needs:
        return True
    if kind in CONTAINERS:
        return not why_unusable(kind)
    return kind in ("", "bubblewrap") and bool(working_container())


def _told(need: Need, kind: str) -> str:
    if kind in CONTAINERS:
        return f"{need.where}: {need.what}: {why_unusable(kind)}"
    advice = "install docker or podman, and start it"
    if need.what.startswith("FROM "):
        image = need.what.split()[1]
        advice += (
            f"; or, if the system of this machine will do in place of the image, give kwargs: {{host_images: ['{image}']}}"
        )
    return f"{need.where}: {need.what}: boxes of kind {kind} cannot do this; {advice}."


async def box_kind(folder: TaskFolder, sandbox: str, own_image: str | None = None) -> tuple[str, str]:
    """Return the kind of box for a task (as in ``rollout.sandbox``), and the image that holds its files or an empty string.

    An image is built or pulled if it is not there yet.

    Args:
        folder: the task.
        sandbox: kind of box, as in ``rollout.sandbox``.
        own_image: image of the box, in place of that of the task.

    Raises:
        DataError: the task needs a container, and there is none.
        SandboxError: the image cannot be made.
    """
    return await asyncio.to_thread(_box_kind, folder, sandbox, own_image)


def _box_kind(folder: TaskFolder, sandbox: str, own_image: str | None) -> tuple[str, str]:
    refuse_needs(folder, sandbox)
    kind = sandbox.partition(":")[0]
    if kind not in CONTAINERS:
        if not folder.needs:
            return sandbox, ""
        kind = working_container()
    if not own_image and folder.needs and not (folder.environment.workdir or folder.files.workdir):
        raise DataError(
            f"{folder.path / 'task.toml'}: environment.workdir is not set; name the directory of the image in which the agent works."
        )
    seconds = folder.environment.build_timeout_sec
    if own_image:
        image = own_image
        _make_image(kind, image, ["pull", image], seconds)
    elif folder.context is not None and folder.files.base != "scratch":
        image = f"rollwright-task:{_digest(folder.context)}"
        _make_image(kind, image, ["build", "--tag", image, str(folder.context)], seconds)
    elif folder.image:
        image = folder.image
        _make_image(kind, image, ["pull", image], seconds)
    else:
        return sandbox, ""
    return f"{kind}:{image}", image


async def image_files(kind: str, image: str, paths: Sequence[str]) -> list[tuple[Path, str]]:
    """Copy directories of an image to this machine, because a box begins with empty ones in their place.

    Args:
        kind: kind of box, such as ``docker:IMAGE``.
        image: the image.
        paths: directories of the image; those that it does not have are left out.

    Returns:
        Each copy, with its path in the box.
    """
    return await asyncio.to_thread(_image_files, kind.partition(":")[0], image, paths)


def _image_files(program: str, image: str, paths: Sequence[str]) -> list[tuple[Path, str]]:
    with _locks[image]:
        known = _extracted.setdefault((program, image), {})
        if missing := [path for path in paths if path not in known]:
            directory = tempfile.mkdtemp(prefix="rollwright-image-")
            atexit.register(shutil.rmtree, directory, ignore_errors=True)
            container = _output([program, "create", image, "true"])
            try:
                for number, path in enumerate(missing):
                    target = Path(directory, str(number))
                    done = subprocess.run([program, "cp", f"{container}:{path}", str(target)], capture_output=True)
                    known[path] = target if done.returncode == 0 else None
            finally:
                subprocess.run([program, "rm", "--force", container], capture_output=True)
        return [(copy, path) for path in paths if (copy := known[path]) is not None]


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True)
    if done.returncode != 0:
        raise SandboxError(f"{' '.join(command)} failed: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return done.stdout.decode().strip()


#: Program and image -> directory of the image -> its copy on this machine, or None if the image does not have it.
_extracted: dict[tuple[str, str], dict[str, Path | None]] = {}
_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


def _make_image(program: str, image: str, command: list[str], seconds: float) -> None:
    """Build or pull an image, once for all samples that need it."""
    with _locks[image]:
        if subprocess.run([program, "image", "inspect", image], capture_output=True).returncode == 0:
            return
        said = f"{program} {' '.join(command)}"
        try:
            done = subprocess.run([program, *command], capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise SandboxError(f"{said} took longer than environment.build_timeout_sec={seconds:g}; raise it.") from error
        if done.returncode != 0:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
            raise SandboxError(f"{said} failed: {last[0]}")


def _digest(context: Path) -> str:
    """Hash the files from which an image is built."""
    made = hashlib.blake2b(digest_size=8)
    for path in sorted(context.rglob("*")):
        made.update(f"{path.relative_to(context)}\0{path.lstat().st_mode}\0".encode())
        if path.is_file():
            made.update(path.read_bytes())
    return made.hexdigest()
