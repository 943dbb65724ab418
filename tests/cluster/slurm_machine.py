"""A cluster of Slurm on this machine, in a directory of its own: munged, slurmctld and slurmd, without systemd and cgroups."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from quiet_ports import quiet_ports

#: The daemon that vouches for users; it does not run as root, and its packages make this user.
MUNGE = "munge"
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1
ReturnToService=2
MpiDefault=none
KillWait=5
JobAcctGatherType=jobacct_gather/none
NodeName=one NodeHostname={host} NodeAddr=127.0.0.5 Port={ports[0]} CPUs=2 RealMemory=1000
NodeName=two NodeHostname={host} NodeAddr=127.0.0.6 Port={ports[1]} CPUs=2 RealMemory=1000
PartitionName=main Nodes=ALL Default=YES State=UP
"""


@contextlib.contextmanager
def slurm(directory: Path) -> Iterator[dict[str, str]]:
    """A running cluster of two nodes with two CPUs each; yields the variables under which its programs find it."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs as root")
    host = socket.gethostname().partition(".")[0]
    controller, *ports = quiet_ports(3)
    for name in ("state", "munge"):
        (directory / name).mkdir(parents=True)
    configuration = directory / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(host=host, controller=controller, ports=ports, directory=directory))
    munge = directory / "munge"
    (munge / "key").write_bytes(os.urandom(64))
    (munge / "key").chmod(0o400)
    for path in (munge, munge / "key"):
        shutil.chown(path, MUNGE)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    variables = {"SLURM_CONF": str(configuration)}
    environment = {**os.environ, **variables}
    with contextlib.ExitStack() as started:

        def start(*command: str, user: str | None = None) -> None:
            with (directory / f"{command[0]}-{len(list(directory.glob('*.out')))}.out").open("w") as out:
                process = subprocess.Popen(
                    command, env=environment, user=user, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
                )
            started.callback(process.wait, 20)
            started.callback(process.terminate)

        start("munged", "--foreground", "--force", *(f"--{name}={munge / file}" for name, file in files.items()), user=MUNGE)
        _wait_for(lambda: (munge / "socket").exists(), directory)
        start("slurmctld", "-D")
        for name in ("one", "two"):
            start("slurmd", "-D", "-N", name)
        states = ["sinfo", "-h", "-N", "-o", "%T"]
        _wait_for(
            lambda: subprocess.run(states, env=environment, capture_output=True, text=True).stdout.split() == ["idle"] * 2,
            directory,
        )
        yield variables


def _wait_for(ready, directory: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        said = {path.name: path.read_text()[-1500:] for path in directory.iterdir() if path.suffix in (".log", ".out")}
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
