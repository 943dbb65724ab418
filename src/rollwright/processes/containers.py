"""Containers of Docker and Podman: the sandbox, and the options that it shares with the box (``container_box``)."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollwright.errors import SandboxError
from rollwright.processes.bubblewrap import call_filters
from rollwright.processes.jails import ENVIRONMENT, GRACE_SECONDS, SHARED_BYTES, Jail, SandboxLimits, server_command

CONTAINERS = ("docker", "podman")
DEFAULT_IMAGE = "python:3.12-slim"
_ANSWER_SECONDS = 10.0
#: Options that only podman needs: no further writable directories, no proxies of this machine, which may name a key.
_OF_PODMAN = ("--read-only-tmpfs=false", "--image-volume=ignore", "--http-proxy=false")


@dataclass
class ContainerOptions:
    """What a container can see, do and use. Without ``network``, it has none but its own loopback.

    Attributes:
        user: numeric user and group.
        capabilities: what the user is allowed besides, which is nothing by default.
        memory_bytes: memory of all processes, including files in memory.
        processes: processes and threads.
        shared_bytes: size of ``/dev/shm``.
        directories: writable directories in memory -> size in bytes.
        environment: variables in addition to those of the image.
        network: whether the container has Docker's or Podman's default network.
        mounts: path in the container -> file or directory of this machine, which cannot be written.
        more: further options.
    """

    user: int
    memory_bytes: int
    processes: int
    shared_bytes: int
    directories: Mapping[str, int]
    environment: Mapping[str, str]
    network: bool
    capabilities: Sequence[str] = ()
    mounts: Mapping[str, Path] = field(default_factory=dict)
    more: Sequence[str] = ()


def container_command(
    kind: str, image: str, options: ContainerOptions, command: Sequence[str]
) -> tuple[list[str], Callable[[], object]]:
    """Return the command line that runs ``command`` as process 1 of a container, and a function that removes the container by force.

    Raises:
        SandboxError: the program is not installed.
    """
    program = _program(kind)
    name = f"rollwright-{uuid.uuid4().hex[:12]}"
    tmpfs = "mode=1777,exec,notmpcopyup" if kind == "podman" else "mode=1777,exec"
    started = [
        *(program, "run", "--rm", "--pull=never", f"--name={name}", "--log-driver=none", "--no-healthcheck", "--read-only"),
        *(f"--user={options.user}:{options.user}", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--ipc=private"),
        *(f"--cap-add={capability}" for capability in options.capabilities),
        *(f"--network={'bridge' if options.network else 'none'}", f"--pids-limit={options.processes}"),
        *(f"--memory={options.memory_bytes}", f"--memory-swap={options.memory_bytes}", f"--shm-size={options.shared_bytes}"),
        *(f"--tmpfs={path}:size={size},{tmpfs}" for path, size in options.directories.items()),
        *(f"--env={key}={value}" for key, value in options.environment.items()),
        *(f"--mount=type=bind,{_field('source', path)},{_field('target', at)},readonly" for at, path in options.mounts.items()),
        *(_OF_PODMAN if kind == "podman" else ()),
        *(*options.more, f"--entrypoint={command[0]}", image, *command[1:]),
    ]
    return started, functools.partial(subprocess.run, [program, "rm", "--force", name], capture_output=True)


def _field(key: str, value: object) -> str:
    """Return a field of ``--mount``, which is read as a line of CSV."""
    text = f"{key}={value}"
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"') else text


def check_container(kind: str) -> None:
    """Check that ``docker`` or ``podman`` is installed and answers.

    Raises:
        SandboxError: it does not; the message says what it said.
    """
    try:
        done = subprocess.run([_program(kind), "info"], capture_output=True, timeout=_ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{kind} does not answer ({error}): start its service.") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise SandboxError(f"{kind} does not answer ({said}): start its service, or choose another rollout.sandbox.")


def _program(kind: str) -> str:
    program = shutil.which(kind)
    if program is None:
        raise SandboxError(f"{kind} is not installed: install it, or set rollout.sandbox to bubblewrap.")
    return program


def why_container_fails(kind: str, image: str, said: str) -> str:
    """Explain the output of a container that did not start."""
    return f"{kind} says {said!r}; does '{kind} run --rm {image} python3 -V' work?"


class Container:
    """A sandbox in a Docker or Podman container. Its image must be available locally and contain Python.

    Args:
        kind: ``docker`` or ``podman``.
        image: name of the image. If empty, ``python:3.12-slim`` is used.
    """

    def __init__(self, kind: str, image: str) -> None:
        self.kind, self.image = kind, image or DEFAULT_IMAGE

    def start(self, limits: SandboxLimits) -> Jail:
        """See :class:`Sandbox`."""
        options = ContainerOptions(
            user=65534,
            memory_bytes=(limits.processes + 1) * limits.memory_bytes + limits.disk_bytes + 2**26,
            processes=256,
            shared_bytes=SHARED_BYTES,
            directories={"/tmp": limits.disk_bytes},
            environment={key: value for key, value in ENVIRONMENT.items() if key != "PATH"},
            network=limits.network,
            more=["--interactive", "--workdir=/tmp"],
        )
        command, remove = container_command(self.kind, self.image, options, server_command("python3"))
        return Jail(
            command,
            limits,
            ["/tmp", "/dev/shm"],
            filters=call_filters()[: 1 if limits.processes else 2],
            patience=GRACE_SECONDS,  # a client that is killed while it starts leaves the container running
            environment=os.environ,  # for the client, which finds its daemon and images by it; scripts get only the --env variables
            explain=functools.partial(why_container_fails, self.kind, self.image),
            clean=remove,
        )
