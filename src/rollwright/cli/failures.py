"""Reports of failed commands: one line for the user, and the traceback in a file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path

from rollwright.errors import ConfigError, LostRankError, RollwrightError
from rollwright.registry import missing_module_hint

#: Size at which a file of tracebacks is rotated; one older file is kept.
LOG_BYTES = 1_000_000

_directory: Path | None = None


def keep_tracebacks_in(directory: Path) -> None:
    """Write later tracebacks of this process to ``directory`` (a run's logs) if it exists by then."""
    global _directory
    _directory = directory


def report(error: Exception) -> None:
    """Print the cause of a failure to stderr, and write the traceback to a file.

    A ``ConfigError`` has no traceback, because the user can fix it. If several processes train together, only one reports the cause.
    """
    if not _tells(error):
        return
    rank = os.environ.get("RANK", "0")
    whose = "" if rank == "0" else f"rank {rank}: "
    message = str(error).strip() or "no message"
    kind = type(error).__name__
    if isinstance(error, ConfigError):
        print(f"error: {whose}{message}", file=sys.stderr)
        return
    if not isinstance(error, RollwrightError):
        message = message.splitlines()[0] + missing_module_hint(error)
    file = _write_traceback(error)
    where = f" [traceback: {file}]" if file else ""
    print(f"error: {whose}{kind}: {message}{where}", file=sys.stderr)


def _tells(error: Exception) -> bool:
    """Return False in a process that fails because of another one, or in the same way."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or not os.environ["WORLD_SIZE"].isdigit():
        return True
    if isinstance(error, LostRankError):  # the torchelastic agent, if any, reports which process was lost
        return os.environ.get("RANK") == "0" and "TORCHELASTIC_RUN_ID" not in os.environ
    from rollwright.training.parallel import is_first_cause

    return is_first_cause(f"{type(error).__name__}: {error}")


def _write_traceback(error: Exception) -> Path | None:
    from rollwright.config.secrets import command_line  # loads YAML, which --help does not need

    text = "".join(traceback.format_exception(error))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollwright"
    of_the_run = [_directory] if _directory and _directory.is_dir() else []
    for directory in (*of_the_run, cache):
        file = directory / "failure.log"
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            if file.exists() and file.stat().st_size > LOG_BYTES:
                file.replace(file.with_name("failure.old.log"))
            with file.open("a", encoding="utf-8") as log:
                log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {command_line(sys.argv)}\n{text}\n")
            return file
    if not isinstance(error, RollwrightError):  # a RollwrightError's message is sufficient
        print(text, file=sys.stderr)
    return None
