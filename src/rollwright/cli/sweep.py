"""Several runs of one config, one after another: ``rollwright run`` with ``--seeds``, or with overrides that list several values."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from rollwright.atomic import read_json
from rollwright.config.loading import Stage
from rollwright.config.plan import describe, run_directory_of
from rollwright.config.sweeps import SweepMember
from rollwright.errors import ConfigError
from rollwright.tracking.logging import console
from rollwright.tracking.run_directory import MARKER
from rollwright.tracking.sweeps import SUFFIX, SweepRun, measures_of_summary, sweep_table, write_sweep

#: Environment variable with the process of the sweep, with which a run ends.
PARENT = "ROLLWRIGHT_SWEEP_PROCESS"


@dataclass
class _Loaded:
    """A member with its own trial and stages."""

    member: SweepMember
    run: SweepRun
    words: list[str]
    stages: list[Stage]

    @property
    def directory(self) -> Path:
        return run_directory_of(self.stages)


class Sweep:
    """The runs of a sweep. Each has its own trial, ``TRIAL-lr=1e-4-seed=1``, and runs in its own process.

    Args:
        file: the config file.
        members: what each run overrides.
        load: loads the stages of a config with overrides.
        options: words of the command line that every run gets besides the file and its overrides.
    """

    def __init__(
        self,
        file: str,
        members: Sequence[SweepMember],
        load: Callable[[str, Sequence[str]], list[Stage]],
        options: Sequence[str] = (),
    ) -> None:
        if "RANK" in os.environ:
            raise ConfigError(
                "torchrun starts the processes of one run, but the overrides list several: give one value, or leave torchrun "
                "out and set cluster.processes."
            )
        self.runs: list[_Loaded] = []
        for member in members:
            try:
                place = run_directory_of(load(file, member.overrides))
                trial = f"{place.name}-{member.label}"
                words = [*member.overrides, f"trial_name={trial}"]
                stages = load(file, words)
            except ConfigError as error:
                raise ConfigError(f"the run with {member.name}: {error}") from None
            _refuse_parts_of_runs(stages)
            run = SweepRun(trial, member.setting, member.seed)
            self.runs.append(_Loaded(member, run, ["run", *options, file, *words], stages))
            self.path = place.parent / f"{place.name}{SUFFIX}"

    def show(self) -> str:
        """Describe the runs for a dry run."""
        lines = [f"\nThis would run {len(self.runs)} runs, one after another; those that have finished are skipped:"]
        lines += [f"  {number}. {each.run.trial}: {_state_of(each)}" for number, each in enumerate(self.runs, 1)]
        return "\n".join([*lines, f"The results go to {self.path}. The first run:", describe(self.runs[0].stages)])

    def carry_out(self) -> int:
        """Run what has not finished, print the table, and return the exit status: 1 if a run failed, 128 + n after signal n."""
        with _Signals() as signals:
            for number, each in enumerate(self.runs, 1):
                if signals.received:
                    each.run.state = "stopped"
                    continue
                self._carry_out(number, each, signals)
        write_sweep(self.path, [each.run for each in self.runs])
        self._report(bool(signals.received))
        if signals.received:
            return 128 + signals.received[0]
        return int(any(each.run.state != "finished" for each in self.runs))

    def _carry_out(self, number: int, each: _Loaded, signals: _Signals) -> None:
        title = f"run {number}/{len(self.runs)}: {each.member.name}"
        if _has_finished(each):
            console().print(f"{title} has finished before", highlight=False, markup=False)
        else:
            console().print()
            console().rule(f"[bold]{title}", align="left")
            each.run.state = "running"
            write_sweep(self.path, [each.run for each in self.runs])
            status = signals.run(each.words)
            if signals.received:
                each.run.state = "stopped"
            elif status:
                each.run.state = "failed"
                console().print(f"{title} failed with status {status}; the others go on", style="red", highlight=False)
        if each.run.state not in ("failed", "stopped"):
            each.run.state = "finished"
            with suppress(OSError, ValueError):
                each.run.measures = measures_of_summary(read_json(each.directory / "summary.json"))
        write_sweep(self.path, [each.run for each in self.runs])

    def _report(self, is_stopped: bool) -> None:
        runs = [each.run for each in self.runs]
        terminal = console()
        terminal.print()
        if any(run.measures for run in runs):
            done = sum(run.state == "finished" for run in runs)
            terminal.rule(f"[bold]{done} of {len(runs)} runs", align="left")
            terminal.print(sweep_table(runs), highlight=False)
        for each in self.runs:
            if each.run.state == "failed":
                terminal.print(f"failed: {each.member.name}, in {each.directory}", style="red", soft_wrap=True, highlight=False)
        if is_stopped:
            terminal.print("stopped: the same command again goes on where this one stopped")
        terminal.print()
        terminal.print(f"see it all: rollwright view {self.path.parent}", soft_wrap=True, highlight=False, style="dim")


def _refuse_parts_of_runs(stages: Sequence[Stage]) -> None:
    for stage in stages:
        if (mode := getattr(stage.config, "mode", "both")) in ("explore", "train", "serve"):
            raise ConfigError(
                f"mode {mode} is one process of a run of several, which a sweep cannot start: give single values, or use mode both."
            )


class _Signals:
    """Passes SIGINT and SIGTERM on to the run that is under way; a second one has its usual effect there."""

    def __enter__(self) -> _Signals:
        self.received: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def run(self, words: Sequence[str]) -> int:
        """Run ``rollwright`` with these arguments and return its exit status."""
        command = [sys.executable, "-P", "-m", "rollwright", *words]
        environment = {**os.environ, PARENT: str(os.getpid())}
        # In a session of its own, Ctrl-C reaches only this process, which passes it on.
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            if self.received:  # before the process was known
                self._process.send_signal(self.received[-1])
            return self._process.wait()
        finally:
            self._process = None


def _config_of(each: _Loaded) -> Any:
    return json.loads(json.dumps({"stages": [stage.to_dict() for stage in each.stages]}, default=str))


def _marker(each: _Loaded) -> dict[str, Any]:
    try:
        return read_json(each.directory / MARKER)
    except (OSError, ValueError):
        return {}


def _has_finished(each: _Loaded) -> bool:
    """Return True if the run has finished with this config, so that nothing would be done."""
    marker = _marker(each)
    return bool(marker.get("finished")) and marker.get("config") == _config_of(each)


def _state_of(each: _Loaded) -> str:
    if _has_finished(each):
        return "finished"
    return "started before, goes on" if _marker(each) else "new"


def end_with_sweep() -> None:
    """In a run of a sweep: end, in order, if the process of the sweep is gone."""
    if parent := os.environ.pop(PARENT, ""):
        from rollwright.processes.tree import die_with_parent

        die_with_parent(int(parent), signal.SIGTERM)


def carry_out_sweep(sweep: Sweep, dry_run: bool) -> None:
    """Run a sweep, or describe it; exits with its status."""
    from rollwright.trainers.checks.missing_inputs import refuse_missing_inputs

    if dry_run:
        for each in sweep.runs:
            refuse_missing_inputs(each.stages)
        typer.echo(sweep.show())
    elif status := sweep.carry_out():
        raise typer.Exit(status)
