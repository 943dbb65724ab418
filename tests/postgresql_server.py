"""A PostgreSQL server of the tests' own, in a temporary directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

#: PostgreSQL refuses to run as root; its packages make this user.
USER = "postgres"


def postgresql_programs() -> Path | None:
    """Where PostgreSQL's programs are; None where it is not installed."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return installed[-1].parent if installed else None


@contextlib.contextmanager
def postgresql_server() -> Iterator[str]:
    """URL of a server that runs for the time of the block."""
    programs = postgresql_programs()
    assert programs is not None, "no PostgreSQL server is installed (Debian: postgresql)"
    user = USER if os.geteuid() == 0 else None
    with contextlib.ExitStack() as opened:
        directory = tempfile.mkdtemp(prefix="rollwright-postgresql-", dir="/tmp")  # a socket's path has to be short
        opened.callback(shutil.rmtree, directory, ignore_errors=True)
        if user is not None:
            shutil.chown(directory, user)
        data = f"{directory}/data"
        subprocess.run(
            [programs / "initdb", "-D", data, "-A", "trust", "-U", "rollwright", "--no-sync"],
            user=user,
            cwd=directory,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        settings = {"port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": directory, "fsync": "off"}
        command = [
            programs / "postgres",
            "-D",
            data,
            *(part for key, value in settings.items() for part in ("-c", f"{key}={value}")),
        ]
        with open(f"{directory}/log", "wb") as log:
            server = subprocess.Popen(command, user=user, cwd=directory, stdout=log, stderr=log)
        opened.callback(server.wait, 60)
        opened.callback(server.send_signal, signal.SIGQUIT)  # at once: nothing of it is kept
        deadline = time.monotonic() + 120
        while subprocess.run(
            [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL
        ).returncode:
            said = Path(directory, "log").read_text()
            assert server.poll() is None, f"PostgreSQL ended: {said}"
            assert time.monotonic() < deadline, f"PostgreSQL does not answer: {said}"
            time.sleep(0.1)
        yield f"postgresql+psycopg://rollwright@127.0.0.1:{port}/postgres"
