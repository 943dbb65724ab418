"""Runs as Slurm batch jobs: submits, follows and cancels them.

Invariants:

* a job has ended if its state is not one of the known states of waiting and running jobs;
* if Slurm's controller does not answer, it is asked again for a limited time; silence never counts as the end of a job;
* a run has at most one job: a second command for the same run follows the existing job.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright.config.cluster_rules import uses_ray
from rollwright.config.loading import Stage
from rollwright.config.plan import run_directory_of
from rollwright.config.secrets import command_line
from rollwright.config.sections import ClusterConfig
from rollwright.errors import ClusterError, ConfigError
from rollwright.placement.torchrun import signals_to
from rollwright.tracking.logging import getLogger

logger = getLogger("Slurm")

#: States of waiting and running jobs. A job in any other state has ended, even if a later version of Slurm added that state.
_GOES_ON = {
    *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT", "COMPLETING"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "EXPEDITING", "POWER_UP_NODE"),
}
#: Exit statuses for states in which Slurm reports none for the program.
_STATUS_OF = {"COMPLETED": 0, "TIMEOUT": 124, "DEADLINE": 124, "OUT_OF_MEMORY": 137, "CANCELLED": 143, "PREEMPTED": 143}
#: Seconds without an answer from Slurm's controller after which a job is no longer followed.
_SILENCE_SECONDS = 600.0
#: Seconds that the last lines of a log may take to arrive through a network file system.
_LOG_SECONDS = 1.0
#: Variables that Slurm's programs need; a job passes them on to a job that it submits.
_KEPT = {"SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS"}


class SlurmPlacement:
    """See ``Placement``. Submits a job that runs the same command on one node, or on a Ray cluster of the job's nodes."""

    inputs_are_here = False

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster

    def check(self, config: Any) -> None:
        """Do nothing, because the job runs on another machine."""

    def show(self, stages: Sequence[Stage], words: Sequence[str]) -> list[str]:
        """Return the job's script, without secrets."""
        script = job_script(self._cluster, run_directory_of(stages).absolute(), words, hides_secrets=True)
        return ["\nIt would be the job of this script:\n", script]

    def start(self, words: Sequence[str], run_directory: Path) -> int:
        """Submit the job and follow it."""
        return run_job(self._cluster, run_directory, words)

    def join(self, configs: Sequence[Any]) -> None:
        """Raise an error: stages never run in this process."""
        raise ConfigError("cluster.kind: is slurm, whose jobs `rollwright run` submits; set cluster.kind=local to run here.")


def job_script(cluster: ClusterConfig, run_directory: Path, words: Sequence[str], *, hides_secrets: bool = False) -> str:
    """Return the batch script of a run.

    Args:
        cluster: section whose ``slurm`` section has the resources.
        run_directory: the run's directory; the job's output is written next to it.
        words: arguments of the job's ``rollwright`` command.
        hides_secrets: mask secrets, for a script that is only shown.
    """
    slurm, name = cluster.slurm, _name_of(run_directory)
    options = {
        "job-name": name,
        "chdir": os.getcwd(),
        "output": _log_pattern(run_directory),
        "open-mode": "append",  # a requeued job resumes its run
        "export": "ALL",
        "nodes": cluster.nodes,
        "ntasks-per-node": 1,
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,
        "signal": f"B:TERM@{slurm.end_early}" if slurm.time and slurm.end_early else None,
        "cpus-per-task": slurm.cpus_per_node,
        "gpus-per-node": slurm.gpus_per_node,
        "mem": slurm.memory,
    }
    asked = [f"--{key}={shlex.quote(str(value))}" for key, value in options.items() if value is not None]
    inside = "ray" if uses_ray(cluster) else "local"
    command = [sys.executable, "-P", "-m", "rollwright", *words, f"cluster.kind={inside}"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in [*asked, *slurm.arguments]),
        "set -e",
        *slurm.setup,
        *(["unset RAY_ADDRESS"] if inside == "ray" else []),
        f"exec {command_line(command) if hides_secrets else shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def run_job(cluster: ClusterConfig, run_directory: Path, words: Sequence[str]) -> int:
    """Submit a job for a run, or find the run's existing job, and follow the job until it ends.

    The job's output is copied to stdout. The first SIGINT or SIGTERM makes the run finish its step and save (a waiting job is
    cancelled); a second one cancels the job. If this process is killed, the job continues.

    Returns:
        The exit status of the run, or 128 plus the number of the signal that this process received.

    Raises:
        ConfigError: Slurm is not installed here.
        ClusterError: Slurm rejected the job, or no longer answers.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "cluster.kind: is slurm, but there is no sbatch here; run this on a machine from which jobs are submitted, or set "
            "cluster.kind=local."
        )
    if "RANK" in os.environ:
        raise ConfigError(
            "cluster.kind: is slurm, of which one process submits one job; start `rollwright run` without torchrun."
        )
    run_directory = run_directory.absolute()
    job = Job.of(run_directory)
    if job is not None:
        logger.info("job %s carries out %s already: following it", job.number, run_directory)
    else:
        run_directory.parent.mkdir(parents=True, exist_ok=True)
        job = Job.submit(job_script(cluster, run_directory, words), run_directory)
        logger.info("submitted job %s; its output is in %s", job.number, job.log)
    return _follow(job, cluster.slurm.poll_seconds)


@dataclass(frozen=True)
class State:
    """State of a job, as reported by Slurm."""

    name: str
    reason: str
    code: int
    signal: int

    @classmethod
    def of(cls, name: str, reason: str, codes: str) -> State:
        """Parse ``codes``, the exit status and the signal, such as ``1:0``."""
        code, _, number = codes.partition(":")
        return cls(name, reason, int(code or 0), int(number or 0))

    @property
    def is_end(self) -> bool:
        """True if the job is neither waiting nor running."""
        return self.name not in _GOES_ON

    @property
    def status(self) -> int:
        """The exit status of a job that has ended."""
        if self.name == "FAILED":  # Slurm reports no status of the program for other states
            return self.code or (128 + self.signal if self.signal else 1)
        return _STATUS_OF.get(self.name, 1)

    def __str__(self) -> str:
        return self.name if self.reason in ("", "None") else f"{self.name} ({self.reason})"


@dataclass(frozen=True)
class Job:
    """A Slurm job, and the file with its output."""

    number: str
    log: Path

    @classmethod
    def submit(cls, script: str, run_directory: Path) -> Job:
        """Submit a script.

        Raises:
            ClusterError: Slurm rejected the script.
        """
        inside = "SLURM_JOB_ID" in os.environ  # the new job must not inherit the resources of this one
        environment = {
            name: value for name, value in os.environ.items() if not (inside and name.startswith("SLURM_")) or name in _KEPT
        }
        answer = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, env=environment)
        if answer.returncode:
            raise ClusterError(
                f"sbatch refused the job: {_last_line(answer.stderr)}; correct cluster.slurm (--dry-run prints the script)."
            )
        return cls._numbered(answer.stdout.strip().split(";")[0], run_directory)

    @classmethod
    def of(cls, run_directory: Path) -> Job | None:
        """Return this user's waiting or running job for a run directory, or None."""
        answer = subprocess.run(
            ["squeue", "--me", "--noheader", f"--name={_name_of(run_directory)}", "--format=%i"], capture_output=True, text=True
        )
        if answer.returncode:
            raise ClusterError(f"squeue failed: {_last_line(answer.stderr)}; see that Slurm's controller runs (scontrol ping).")
        jobs = [cls._numbered(number, run_directory) for number in answer.stdout.split()]
        pattern = _log_pattern(run_directory)  # some versions of Slurm show a waiting job's pattern unexpanded
        shown = [(job, job._shown().stdout) for job in jobs]
        return next((job for job, text in shown if any(f"StdOut={name}" in text for name in (job.log, pattern))), None)

    @classmethod
    def _numbered(cls, number: str, run_directory: Path) -> Job:
        return cls(number, Path(f"{run_directory}.slurm-{number}.log"))

    def state(self) -> State | None:
        """Return the job's state, or None if Slurm does not answer.

        Raises:
            ClusterError: Slurm does not know the job.
        """
        answer = self._shown()
        if answer.returncode == 0 and (name := _field("JobState", answer.stdout)):
            return State.of(name, _field("Reason", answer.stdout), _field("ExitCode", answer.stdout))
        if "Invalid job id" not in answer.stderr:
            return None
        if recorded := self._recorded():
            return recorded
        raise ClusterError(
            f"Slurm knows no job {self.number} any more, so how it ended is not known: look at {self.log}, and run the same command "
            "again where the run has not finished."
        )

    def _shown(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["scontrol", "show", "job", self.number, "--oneliner"], capture_output=True, text=True)

    def _recorded(self) -> State | None:
        """Look up a job that the controller no longer knows in Slurm's accounting. Returns None if that has no record."""
        if shutil.which("sacct") is None:
            return None
        asked = ["sacct", "-j", self.number, "-X", "--noheader", "--parsable2", "--format=State,ExitCode"]
        answer = subprocess.run(asked, capture_output=True, text=True)
        lines = answer.stdout.splitlines()
        if answer.returncode or not lines:
            return None
        name, _, codes = lines[-1].partition("|")
        return State.of(name.split()[0], "", codes)  # the name may be "CANCELLED by 0"

    def ask_to_end(self) -> None:
        """Make the run finish its step and save, or cancel the job if it is not running yet."""
        state = self.state()
        if state is None or state.name != "RUNNING" or not self._signal("--batch", "--signal=TERM"):
            self.cancel()

    def cancel(self) -> None:
        """End the job immediately."""
        self._signal()

    def _signal(self, *options: str) -> bool:
        return subprocess.run(["scancel", *options, self.number], capture_output=True).returncode == 0


def _follow(job: Job, poll_seconds: float) -> int:
    """Copy a job's output to stdout until the job has ended. Returns the exit status."""
    shown, said, handled = 0, "", 0
    asked = answered = time.monotonic() - poll_seconds
    with signals_to(lambda received: None) as signals:
        while True:
            shown = _show(job.log, shown)
            if len(signals) > handled:
                handled = len(signals)
                if handled == 1:
                    logger.warning("the run in job %s finishes its step and saves; once more cancels the job", job.number)
                    job.ask_to_end()
                else:
                    job.cancel()
            if time.monotonic() - asked >= poll_seconds:
                asked = time.monotonic()
                state = job.state()
                if state is not None:
                    answered = asked
                    if state.is_end:
                        break
                    if str(state) != said:
                        said = str(state)
                        logger.info("job %s is %s", job.number, said)
                elif asked - answered > _SILENCE_SECONDS:
                    raise ClusterError(
                        f"Slurm's controller has not answered for {_SILENCE_SECONDS:g} s; job {job.number} may still run. Run the same "
                        f"command again to follow it, or end it with scancel {job.number}."
                    )
            time.sleep(min(0.2, poll_seconds))
        _show_rest(job.log, shown)
        status = state.status
        if status:
            print(f"error: job {job.number} has ended as {state}; its output is in {job.log}", file=sys.stderr)
        return 128 + signals[0] if signals and status else status


def _show(log: Path, shown: int) -> int:
    """Copy new output to stdout. Returns the number of bytes copied so far."""
    try:
        with log.open("rb") as file:
            file.seek(shown)
            while part := file.read(1 << 16):
                sys.stdout.buffer.write(part)
                shown += len(part)
    except FileNotFoundError:  # the job has not started, or the file has not arrived
        return shown
    sys.stdout.flush()
    return shown


def _show_rest(log: Path, shown: int) -> None:
    deadline = time.monotonic() + _LOG_SECONDS
    while time.monotonic() < deadline:
        shown = _show(log, shown)
        time.sleep(0.2)


def _name_of(run_directory: Path) -> str:
    return f"{run_directory.parent.name}.{run_directory.name}"


def _log_pattern(run_directory: Path) -> str:
    """Return the path of the job's output file, as a pattern for ``sbatch``."""
    return str(run_directory).replace("%", "%%") + ".slurm-%j.log"


def _field(name: str, text: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S*)", text)
    return found[1] if found else ""


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
