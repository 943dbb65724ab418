"""The bubblewrap box: the read-only system, separate namespaces, and writable directories in memory."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollwright.errors import SandboxError
from rollwright.processes import bubblewrap
from rollwright.processes.box import BoxSpec
from rollwright.processes.pids_limit import pids_limited
from rollwright.processes.server_box import SHARED_BYTES, USER, ServerBox, ServerStart, box_server_command, user_files

_SOCKETS, _PYTHON = "/run/rollwright", "/opt/rollwright"


def make_bubblewrap_box(spec: BoxSpec) -> ServerBox:
    """Return a box that ``bwrap`` isolates."""
    if spec.image:
        raise SandboxError(f"a bubblewrap box has no image, and {spec.image!r} was given: use the box docker or podman.")
    return ServerBox(spec, _prepare)


@contextlib.contextmanager
def _prepare(spec: BoxSpec) -> Iterator[ServerStart]:
    bwrap = bubblewrap.program()
    whole, _ = bubblewrap.call_filters()
    sockets = {port: f"{_SOCKETS}/{port}.sock" for port in spec.ports}
    own = _own_paths(spec.network)
    with contextlib.ExitStack() as pipes:
        descriptors = [pipes.enter_context(bubblewrap.open_pipe(whole))]
        command = [bwrap, *bubblewrap.isolation("box", USER, _environment())]
        command += bubblewrap.system(spec.network, SHARED_BYTES)
        for path in spec.writable:
            command += bubblewrap.sized(path, spec.limits.disk_bytes)
        command += bubblewrap.readable(own)
        for path, content in _etc(spec).items():
            descriptors.append(pipes.enter_context(bubblewrap.open_pipe(content.encode())))
            command += ["--perms", "0644", "--ro-bind-data", str(descriptors[-1]), path]
        command += bubblewrap.readable(spec.readable)
        for port, path in sockets.items():
            command += ["--bind", str(Path(spec.ports[port]).resolve()), path]
        command += [*bubblewrap.closed(), "--seccomp", str(descriptors[0]), "--", *box_server_command(_moved(sys.executable))]
        limited, clean = pids_limited(command, spec.limits.processes)
        yield ServerStart(
            limited,
            paths={path: path for path in spec.writable},
            environment=_environment(),
            server_paths=sockets,
            pass_fds=descriptors,
            roots=["/dev/shm"],
            kept=list(own),
            explain=bubblewrap.why_bubblewrap_fails,
            clean=clean,
        )


def _environment() -> dict[str, str]:
    """Return the environment of all programs. This Python comes first in PATH, with its packages."""
    programs = os.path.dirname(_moved(sys.executable))
    return {"PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}


def _moved(path: str) -> str:
    """Return where a path of this Python is in a box: a virtual environment is not shown where it is, which may be a writable directory."""
    is_of_environment = sys.prefix != sys.base_prefix and f"{path}/".startswith(f"{sys.prefix}/")
    return _PYTHON + path[len(sys.prefix) :] if is_of_environment else path


def _own_paths(network: bool) -> dict[str, str]:
    """Return the paths of this Python and of the system: path in the box -> path outside."""
    names = ("python", "python3", f"python3.{sys.version_info.minor}")
    programs = [os.path.join(os.path.dirname(sys.executable), name) for name in names]
    paths = [*bubblewrap.python_paths(), *programs, *bubblewrap.system_files(network), *bubblewrap.CERTIFICATES]
    return {_moved(path): path for path in paths}


def _etc(spec: BoxSpec) -> Mapping[str, str]:
    """Return the files of ``/etc`` that name the user and this machine."""
    files = user_files(spec, "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh")
    if not spec.network:
        files |= {
            "/etc/hosts": "127.0.0.1 localhost box\n",
            "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        }
    return files
