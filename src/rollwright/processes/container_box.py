"""Docker and Podman boxes: an image whose files are read-only, without network and capabilities, and writable directories in memory.

The box server is the container's process 1. It connects to a Unix socket that is bound into the container, because the container's
program passes no socket on, and the server needs one: it receives the descriptors of each command's input and output.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rollwright.errors import SandboxError
from rollwright.processes.box import BoxSpec
from rollwright.processes.bubblewrap import call_filters
from rollwright.processes.containers import DEFAULT_IMAGE, ContainerOptions, container_command, why_container_fails
from rollwright.processes.pids_limit import OWN_PROCESSES
from rollwright.processes.server_box import SHARED_BYTES, USER, ServerBox, ServerStart, box_server_command, user_files

_PLACE = "/run/rollwright"
#: Makes the writable directories the user's own, and becomes that user, without capabilities. Starting as the user would not do: where an
#: image has a directory of that name, runc 1.1 gives the new one its mode, and podman 4 cannot give it an owner.
_BECOME_USER = """
import ctypes, os
for path in {paths!r}: os.chown(path, {user}, {user})
for capability in range(64): ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.setgroups([])
os.setresgid({user}, {user}, {user})
os.setresuid({user}, {user}, {user})
"""
_CAPABILITIES = ("CHOWN", "SETGID", "SETUID", "SETPCAP")  # of the lines above
_OWN_BYTES = 2**28  # memory of the server, and room for the kernel's own


def make_docker_box(spec: BoxSpec) -> ServerBox:
    """Return a box in a container of Docker."""
    return ServerBox(spec, functools.partial(_prepare, "docker"))


def make_podman_box(spec: BoxSpec) -> ServerBox:
    """Return a box in a container of Podman."""
    return ServerBox(spec, functools.partial(_prepare, "podman"))


@contextlib.contextmanager
def _prepare(kind: str, spec: BoxSpec) -> Iterator[ServerStart]:
    image, limits = spec.image or DEFAULT_IMAGE, spec.limits
    _check_permissions(kind, spec)
    whole, _ = call_filters()
    sockets = {port: f"{_PLACE}/ports/{port}.sock" for port in spec.ports}
    with contextlib.ExitStack() as until_ended:
        private = until_ended.enter_context(tempfile.TemporaryDirectory(prefix="rollwright-box-"))
        bound = Path(private, "bound")  # other users of this machine cannot enter the directory above
        bound.mkdir()
        listener = until_ended.enter_context(_listener(bound / "server.sock"))
        files = user_files(spec, "/bin/sh")
        for number, content in enumerate(files.values()):
            (bound / str(number)).write_text(content)
        for path in (bound, *bound.iterdir()):
            path.chmod(path.stat().st_mode | 0o555 if path.is_dir() else path.stat().st_mode | 0o444)
        options = ContainerOptions(
            user=0,
            capabilities=_CAPABILITIES,
            memory_bytes=limits.memory_bytes + limits.disk_bytes + SHARED_BYTES + _OWN_BYTES,
            processes=limits.processes + OWN_PROCESSES,
            shared_bytes=SHARED_BYTES,
            directories=dict.fromkeys(spec.writable, limits.disk_bytes),
            environment={"LANG": "C.UTF-8"},
            network=spec.network,
            mounts={
                f"{_PLACE}/server": bound,
                **{sockets[port]: path.resolve() for port, path in spec.ports.items()},
                **{path: bound / str(number) for number, path in enumerate(files)},
                **{inside: path.resolve() for inside, path in spec.readable.items()},
            },
            more=["--hostname=box", "--workdir=/", "--security-opt=label=disable"],  # SELinux would refuse bound files
        )
        first = _BECOME_USER.format(paths=list(spec.writable), user=USER)
        server = box_server_command("python3", f"{_PLACE}/server/server.sock", first=first)
        command, remove = container_command(kind, image, options, server)
        until_ended.callback(remove)
        yield ServerStart(
            command,
            paths={path: path for path in spec.writable},
            environment=os.environ,  # for the client, which finds its daemon and images by it
            server_paths=sockets,
            filters=[whole],
            roots=["/dev/shm"],
            explain=functools.partial(why_container_fails, kind, image),
            clean=until_ended.pop_all().close,
            listener=listener,
        )


def _listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise SandboxError(
            f"the Unix socket {path} cannot be made ({error}); is the path of TMPDIR longer than 60 characters?"
        ) from error
    listener.listen(1)
    path.chmod(0o666)
    return listener


def _check_permissions(kind: str, spec: BoxSpec) -> None:
    """Refuse files that the user of a container, who is not the one who runs this process, could not use."""
    needed = [(path, 0o002, "connect to", "o+w") for path in spec.ports.values()]
    needed += [
        (path, 0o005, "read", "o+rX") if path.is_dir() else (path, 0o004, "read", "o+r") for path in spec.readable.values()
    ]
    for path, bits, verb, mode in needed:
        if path.stat().st_mode & bits != bits:
            raise SandboxError(
                f"the user of a {kind} box may not {verb} {path}: allow it (chmod {mode}); parents may stay closed."
            )
