"""The run directory: ``<root>/<experiment>/<trial>/``, owned by one run and written by one process at a time; only its user may enter.

::

    run.json         identity of the run: its config, a hash of the config, when the run began, whether it finished, its software
    run.lock         names the process that writes here
    metrics.jsonl    one line for each step
    summary.json     results
    journal/         model requests and answers of episodes
    rollouts/        readable trajectories
    checkpoints/     Hugging Face checkpoints
    recover/         recovery checkpoints
    teacher_scores.db   teachers' scores of a dataset's rows, if rows are drawn more than once
    logs/            messages of all levels
    attempts/        files of attempts that cannot be resumed, because they have neither a recovery checkpoint nor a journal
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollwright.atomic import read_json, remedy_of, sweep, write_json
from rollwright.config.experiment import STAGE_CLASSES
from rollwright.config.loading import is_default
from rollwright.errors import CheckpointError, ConfigError, RollwrightError
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics_file import read_metrics
from rollwright.tracking.software import software

logger = getLogger("run")

MARKER = "run.json"
LOCK = "run.lock"
_SILENT_SECONDS = 300.0  # a process on another host that writes nothing for so long has ended
#: Config keys that may differ between a run and its resumption: they do not change what is learned from given data.
NOT_IDENTITY = (
    "recover",
    "saver",
    "evaluator",
    "bench",
    "journal",
    "service",
    "stats_logger",
    "cluster",
    "total_train_steps",
    "total_train_epochs",
    "rollout.setup_timeout",
)
_NAME = re.compile(r"[\w][\w.+@=-]*")


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections into one dict: ``{"actor.optimizer.lr": 1e-5, …}``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{prefix}{key}."))
        elif key == "stages" and isinstance(value, list):
            flat.update(flattened({str(index): stage for index, stage in enumerate(value)}, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _without_stage(key: str) -> str:
    return re.sub(r"^stages\.\d+\.", "", key)


def _is_identity(key: str) -> bool:
    key = _without_stage(key)
    return not any(key == name or key.startswith(f"{name}.") for name in NOT_IDENTITY)


def _lengths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested length of a run, or of each of its stages."""
    return {
        key: value
        for key, value in flattened(config).items()
        if key.rpartition(".")[2] in ("total_train_steps", "total_train_epochs")
    }


def identity_of(config: Mapping[str, Any]) -> str:
    """Hash the config without the keys that a resumed run may change."""
    relevant = {key: value for key, value in flattened(config).items() if _is_identity(key)}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()[:16]


def is_claimed(path: Path) -> bool:
    """Return True if a process owns a run directory, without touching its lock. A process on another host counts while it writes."""
    lock = path / LOCK
    try:
        owner, inode = lock.read_text(encoding="utf-8", errors="replace"), lock.stat().st_ino
    except OSError:
        return False
    match = re.fullmatch(r"process (\d+) on (\S+)\s*", owner)
    if match is None:
        return False
    if match[2] == socket.gethostname() and Path("/proc/locks").exists():
        held = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
        return re.search(rf"FLOCK .* {match[1]} [0-9a-f:]+:{inode} ", held) is not None
    written = [file.stat().st_mtime for file in (*path.glob("**/metrics.jsonl"), *path.glob("**/*.journal"))]
    return bool(written) and time.time() - max(written) < _SILENT_SECONDS


class RunFinishedError(CheckpointError):
    """Raised if a finished run is started again with the same config, so there is nothing to do."""


class RunDirectory:
    """The paths of a run, ``<root>/<experiment>/<trial>``, and the right to write there. The root is ``cluster.fileroot``.

    The constructor touches no files, so readers can use it; :meth:`claim` creates and locks the directory.
    """

    def __init__(self, root: str | Path, experiment: str, trial: str) -> None:
        for key, name in (("experiment_name", experiment), ("trial_name", trial)):
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{key} is {name!r}, which cannot name a directory: use letters, digits and . _ + @ = -.")
        self.experiment, self.trial = experiment, trial
        self.resumed = False
        self._lock_file: int | None = None
        self._whole: RunDirectory = self  # for a stage, the directory of the run, which holds the lock
        self._set_path(Path(root) / experiment / trial)

    def _set_path(self, path: Path) -> None:
        self.path = path
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.recover = path / "recover"
        self.logs = path / "logs"
        self.journal = path / "journal"
        self.metrics_file = path / "metrics.jsonl"
        self.summary_file = path / "summary.json"
        self.trace_file = path / "trace.json"  # Chrome trace of the phases
        self.stages_file = path / "stages.json"  # results of finished stages, in a run of several

    def _inside(self, path: Path) -> RunDirectory:
        """Return a directory of the same layout inside this one."""
        part = RunDirectory(self.path.parent.parent, self.experiment, self.trial)
        part._set_path(path)
        part._whole = self._whole
        return part

    @property
    def has_metrics(self) -> bool:
        """True if a step was logged."""
        return self.metrics_file.exists() and self.metrics_file.stat().st_size > 0

    @property
    def steps_made(self) -> int:
        """Number of logged steps, summed over the stages."""
        parts = [part for part in self._parts() if part.has_metrics]
        return sum(max(record["step"] for record in read_metrics(part.metrics_file)) for part in parts)

    @property
    def has_journal(self) -> bool:
        """True if episodes were recorded."""
        return any(self.journal.glob("*.journal"))

    def _parts(self) -> list[RunDirectory]:
        """Return this directory and those of the started stages."""
        parts: list[RunDirectory] = [self]
        for child in sorted(self.path.iterdir()) if self.path.is_dir() else []:
            if child.name != "attempts" and (child / "recover").is_dir():
                parts.append(self._inside(child))
        return parts

    @property
    def has_recover_checkpoint(self) -> bool:
        """True if a complete recovery checkpoint exists."""
        return any(self.path.glob("recover/[!.]*")) or any(self.path.glob("*/recover/[!.]*"))

    def stage(self, name: str) -> RunDirectory:
        """Prepare the directory of one stage, inside this one and with the same layout; the run's claim covers it.

        A stage that stopped before its first recovery checkpoint continues from its journal. Without a journal it starts again, and its
        files are set aside.
        """
        part = self._inside(self.path / name)
        part.resumed = self.resumed and (part.has_recover_checkpoint or part.has_journal)
        if part.has_metrics and not part.resumed:
            logger.warning(
                "stage %s stopped before its first recovery checkpoint and kept no journal; it begins anew, and what it left is in %s",
                name,
                part._set_aside(),
            )
        for directory in (part.rollouts, part.checkpoints, part.recover, part.logs):
            directory.mkdir(parents=True, exist_ok=True)
        return part

    def marker(self) -> dict[str, Any] | None:
        """Return the content of ``run.json``, or None if there is no such file.

        Raises:
            CheckpointError: the file cannot be read.
        """
        path = self.path / MARKER
        if not path.exists():
            return None
        try:
            return read_json(path)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged ({error}): the run cannot be identified and is left unchanged. Restore this file from a copy, or "
                "choose another trial_name; rollwright check lists which other files are intact, and rollwright view shows them."
            ) from None

    def finished_stages(self) -> dict[str, Any]:
        """Read the finished stages from ``stages.json``; empty if there is no such file.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if not self.stages_file.exists():
            return {}
        try:
            stages = read_json(self.stages_file)
            if not all(isinstance(stage, dict) for stage in stages.values()):
                raise ValueError("a stage is not a JSON object")
            return stages
        except ValueError as error:
            raise CheckpointError(
                f"{self.stages_file} is damaged ({error}), so the finished stages are unknown. Restore it from a copy, or delete "
                "it: stages with a recovery checkpoint continue from there, all others run again."
            ) from None

    def write_stages(self, stages: Mapping[str, Any]) -> None:
        """Write ``stages.json`` with the finished stages."""
        write_json(self.stages_file, dict(stages), default=str, checked=True)

    def claim(self, config: Mapping[str, Any] | None = None, recover_mode: str = "auto") -> RunDirectory:
        """Claim the directory for this process: create it, or resume the run in it (sets ``resumed``). Returns ``self``.

        Args:
            config: the resolved config, which identifies the run.
            recover_mode: ``auto`` resumes an unfinished run of the same config that has a recovery checkpoint or a journal, and sets
                aside the files of a run that has neither; ``resume`` requires either and also continues a finished run;
                ``off`` requires a directory that no run has used.

        Raises:
            RunFinishedError: the run in the directory has finished, and the config does not ask for more steps.
            CheckpointError: the directory belongs to another process, another config, or a run that must not be reused.
        """
        if recover_mode not in ("auto", "resume", "off"):
            raise ConfigError(f"recover.mode is {recover_mode!r}: choose from auto, resume, off.")
        config = dict(config or {})
        if self.path.exists() and not (self.path / MARKER).exists() and any(c.name != LOCK for c in self.path.iterdir()):
            raise CheckpointError(
                f"{self.path} exists and was not made by a run ({MARKER} is missing): choose another trial_name or cluster.fileroot."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self._lock()
        except OSError as error:
            raise ConfigError(
                f"the run directory {self.path} cannot be written: {error.strerror}; set cluster.fileroot to a directory that you may "
                "write to."
            ) from error
        try:
            self.resumed = self._decide(config, recover_mode)
            self._begin(config, self.marker() if self.resumed else None)
        except BaseException:
            self.release()
            raise
        return self

    def take_up(self, config: Mapping[str, Any]) -> bool:
        """Take over a directory and its content from a process that has ended. Returns False if a process still uses it."""
        try:
            self._lock()
        except CheckpointError:
            return False
        self.stages_file.unlink(missing_ok=True)
        self._begin(dict(config), self.marker())
        return True

    def _begin(self, config: dict[str, Any], previous: dict[str, Any] | None) -> None:
        for directory in list(self.path.glob("**/")):  # safe, because the lock excludes other writers
            for left in sweep(directory, older_than=0.0):
                logger.info("removed %s, which a killed process left unfinished", left)
        for directory in (self.rollouts, self.checkpoints, self.recover, self.logs):
            directory.mkdir(exist_ok=True)
        write_json(
            self.path / MARKER,
            {
                "experiment": self.experiment,
                "trial": self.trial,
                "identity": identity_of(config),
                "began": previous["began"] if previous else time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "resumes": previous.get("resumes", 0) + 1 if previous else 0,
                "finished": False,
                "software": software(),
                "config": json.loads(json.dumps(config, default=str)),
            },
            checked=True,
        )

    def _decide(self, config: Mapping[str, Any], mode: str) -> bool:
        marker = self.marker()
        if marker is None:
            if mode == "resume":
                raise CheckpointError(
                    f"recover.mode=resume, but {self.path} holds no run: check experiment_name and trial_name, or start with recover.mode=auto."
                )
            return False
        began = f"{self.path} holds a run that began {marker.get('began', 'earlier')}"
        parts = self._parts()
        used = self.stages_file.exists() or any(part.has_metrics for part in parts)
        recorded = any(part.has_journal for part in parts)
        resumable = self.stages_file.exists() or recorded or any(part.has_recover_checkpoint for part in parts)
        is_same = marker.get("identity") == identity_of(config) or not _changes(marker.get("config", {}), config)
        if not used and recorded and not any(part.has_recover_checkpoint for part in parts) and (mode == "off" or not is_same):
            logger.info(
                "%s has a run that did not finish its first step; it begins anew; what it left: %s",
                self.path,
                self._set_aside(),
            )
            return False
        if mode == "off" and used:
            raise CheckpointError(
                f"{began}, and recover.mode=off starts only fresh runs: set another trial_name, resume it with recover.mode=auto, "
                "or move the directory away."
            )
        if not used and not resumable:
            if mode == "resume":
                raise CheckpointError(f"{began} but has no recovery checkpoint yet: start it with recover.mode=auto.")
            logger.info("%s has a run that did not finish its first step; it begins anew", self.path)
            return False
        if not is_same and mode == "auto" and not marker.get("finished") and not self._has_trained(parts):
            logger.info(
                "%s has a run of another config (%s) that trained nothing; it begins anew; what it left: %s",
                self.path,
                _difference(marker.get("config", {}), config),
                self._set_aside(),
            )
            return False
        if not is_same:
            raise CheckpointError(
                f"{began} with another config ({_difference(marker.get('config', {}), config)}): set another trial_name, "
                "or restore these keys to resume it."
            )
        trained = any(part.has_recover_checkpoint for part in parts)
        if marker.get("finished") and (mode == "auto" or not trained):
            asked = _lengths(json.loads(json.dumps(dict(config), default=str)))
            is_as_it_was = mode == "auto" and asked == _lengths(marker.get("config", {}))
            raise (RunFinishedError if is_as_it_was else CheckpointError)(
                f"{began} and has finished: set another trial_name for a new run"
                + (
                    ", or recover.mode=resume with more total_train_steps to train on."
                    if trained
                    else "; it left no recovery checkpoint."
                )
            )
        if resumable:
            logger.info("resuming the run in %s", self.path)
            return True
        if mode == "resume":
            raise CheckpointError(f"{began} but has no recovery checkpoint: start it again with recover.mode=auto.")
        aside = self._set_aside()
        logger.warning(
            "the run in %s stopped before its first recovery checkpoint; it begins anew, and what it left is in %s",
            self.path,
            aside,
        )
        return False

    def _has_trained(self, parts: Sequence[RunDirectory]) -> bool:
        """Return True if a step was made, or a stage finished other than one that makes random weights (``kind: model``)."""
        if any(part.has_metrics or part.has_recover_checkpoint for part in parts):
            return True
        return any(stage.get("kind") != "model" for stage in self.finished_stages().values())

    def next_attempt(self) -> Path:
        """Return the directory for the next set of abandoned files."""
        attempts = self.path / "attempts"
        return attempts / str(1 + (sum(1 for _ in attempts.iterdir()) if attempts.is_dir() else 0))

    def _set_aside(self) -> Path:
        aside = self.next_attempt()
        aside.mkdir(parents=True)
        for child in list(self.path.iterdir()):
            if child.name not in ("attempts", LOCK, MARKER):
                child.rename(aside / child.name)
        return aside

    def _lock(self) -> None:
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise CheckpointError(
                f"{self.path} is being written by {owner}: wait for it, stop it, or set another trial_name."
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._lock_file = handle  # the kernel releases it however this process ends

    def check_lock(self) -> None:
        """Check that this process still holds the lock, because a deleted lock file does not exclude other processes. Call it before each checkpoint.

        Raises:
            CheckpointError: the lock or the directory was deleted or replaced.
        """
        whole = self._whole
        if whole._lock_file is None:
            return
        mine = os.fstat(whole._lock_file)
        try:
            found = (whole.path / LOCK).stat()
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (mine.st_dev, mine.st_ino):
            what = f"{whole.path / LOCK} was {'deleted (or the directory was moved)' if found is None else 'replaced'}"
            if not whole.path.is_dir():
                what = f"{whole.path} was moved or removed"
            raise CheckpointError(
                f"{what} while this run wrote there, so another process may be writing there too. This one ends without another checkpoint. "
                "Make sure that no other run uses the directory, then start the run again: it goes on from its last checkpoint."
            )

    @contextmanager
    def explaining_failures(self) -> Iterator[None]:
        """Wrap writes, so that errors such as a full disk, a moved directory or a lost permission suggest a remedy.

        Raises:
            CheckpointError: in place of an ``OSError`` for a file in this directory.
        """
        try:
            yield
        except RollwrightError:
            raise
        except Exception as error:
            cause = error if isinstance(error, OSError) else _disk_error_in(error)
            if cause is None or not self._is_mine(cause):
                raise
            path = self._whole.path
            raise CheckpointError(
                f"{path} cannot be written ({error}): {remedy_of(cause)}, then start the run again, which goes on from its last checkpoint."
            ) from error

    def _is_mine(self, error: OSError) -> bool:
        """Return True if the error probably comes from a write to this directory."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return any(Path(name).absolute().is_relative_to(self._whole.path.absolute()) for name in names)

    def was_left(self) -> bool:
        """Return True if a process on this machine wrote here and has ended."""
        try:
            with (self.path / "run.lock").open("rb") as file:
                if not file.read(200).decode(errors="replace").endswith(f" on {socket.gethostname()}\n"):
                    return False  # from another machine, whose lock may not be visible here
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def finish(self) -> None:
        """Mark the run as finished; from now on only ``recover.mode=resume`` resumes it."""
        write_json(self.path / MARKER, {**(self.marker() or {}), "finished": True}, checked=True)

    def release(self) -> None:
        """Release the directory for another process."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _disk_error_in(error: Exception) -> OSError | None:
    """Return the ``OSError`` of a full disk if a library reports one in another form; otherwise None."""
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if f"os error {number})" in text or os.strerror(number) in text:
            return OSError(number, os.strerror(number))
    return None


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys, sorted, in which a config is not that of the run.

    A key that the version which began the run did not have yet is no change if it has its default.
    """
    before, after = _flattened_twins(old, new)
    missing = object()

    def is_new_default(key: str) -> bool:
        path = [name for name in _without_stage(key).split(".") if not name.isdecimal()]
        return bool(before) and key not in before and any(is_default(cls, path, after[key]) for cls in STAGE_CLASSES.values())

    return [
        key
        for key in sorted({*before, *after})
        if before.get(key, missing) != after.get(key, missing) and _is_identity(key) and not is_new_default(key)
    ]


def _flattened_twins(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Flatten two configs for a comparison, with the sections of a list by their numbers."""

    def numbered(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: numbered(each) for key, each in value.items()}
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            return {str(index): numbered(each) for index, each in enumerate(value)}
        return value

    return [flattened(numbered(json.loads(json.dumps(dict(config), default=str)))) for config in (old, new)]


def _difference(old: Mapping[str, Any], new: Mapping[str, Any], limit: int = 4) -> str:
    before, after = _flattened_twins(old, new)
    keys = _changes(old, new)
    parts = [f"{key}: {before.get(key, 'unset')!r} then, {after.get(key, 'unset')!r} now" for key in keys[:limit]]
    more = len(keys) - limit
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")
