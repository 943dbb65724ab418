"""Logging: ``from rollwright import logging; logging.getLogger("MyWorkflow")``.

Every logger is below one root, ``rollwright``, so one level and one set of handlers apply to a run. If stdout and stderr are both
terminals, rich prints messages above the live display; otherwise messages are plain lines on stderr. Names that this
module does not define, such as ``logging.INFO``, are the standard library's.
"""

from __future__ import annotations

import logging as _standard
import os
import sys
import threading
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

ROOT_NAME = "rollwright"
LEVEL_VARIABLE = "ROLLWRIGHT_LOG_LEVEL"

_LINE_FORMAT = "%(asctime)s %(levelname)-7s %(short_name)s: %(message)s"
_lock = threading.Lock()
_console: Console | None = None


def __getattr__(name: str) -> Any:
    return getattr(_standard, name)


class _ShortName(_standard.Filter):
    """Removes the common root from the logger names in records."""

    def filter(self, record: _standard.LogRecord) -> bool:
        record.short_name = record.name.removeprefix(f"{ROOT_NAME}.")
        return True


class _StderrHandler(_standard.StreamHandler):
    """Writes to whatever ``sys.stderr`` is at the time of the message."""

    def __init__(self) -> None:
        _standard.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class _TerminalHandler(RichHandler):
    """Writes with rich, with the logger's name before the message."""

    def render_message(self, record: _standard.LogRecord, message: str) -> Any:
        text = super().render_message(record, message)
        name = self.console.render_str(f"[dim]{escape(getattr(record, 'short_name', record.name))}[/dim] ")
        return name + text


def console() -> Console:
    """Return the only console of the process, on stdout; log messages and the live display share it."""
    global _console
    with _lock:
        if _console is None:
            _console = Console()
        return _console


def output_is_terminal() -> bool:
    """Return True if stdout and stderr are both terminals that can redraw lines."""
    return bool(console().is_terminal and not console().is_dumb_terminal and sys.stderr is not None and sys.stderr.isatty())


def _root() -> _standard.Logger:
    root = _standard.getLogger(ROOT_NAME)
    terminal = output_is_terminal()  # takes the lock itself
    with _lock:
        if any(isinstance(handler, _StderrHandler | _TerminalHandler) for handler in root.handlers):
            return root
        handler: _standard.Handler
        if terminal:
            assert _console is not None
            handler = _TerminalHandler(console=_console, show_path=False, log_time_format="%H:%M:%S", rich_tracebacks=False)
        else:
            handler = _StderrHandler()
            handler.setFormatter(_standard.Formatter(_LINE_FORMAT, datefmt="%H:%M:%S"))
        handler.addFilter(_ShortName())
        follows = os.environ.get("RANK", "0") != "0" and os.environ.get("WORLD_SIZE", "1") != "1"
        # if several processes train together, only the first one logs messages below errors
        handler.setLevel(os.environ.get(LEVEL_VARIABLE, "ERROR" if follows else "INFO").upper())
        root.addHandler(handler)
        root.setLevel(_standard.DEBUG)
        root.propagate = False
    return root


def getLogger(name: str | None = None) -> _standard.Logger:  # noqa: N802 (the standard library's name)
    """Return a standard library logger below Rollwright's root; its messages go to the terminal (or stderr) and all attached files.

    ``name`` is any name, such as ``"MyWorkflow"`` or ``__name__``. If None, the root logger is returned.
    """
    root = _root()
    if not name or name == ROOT_NAME:
        return root
    return _standard.getLogger(name if name.startswith(f"{ROOT_NAME}.") else f"{ROOT_NAME}.{name}")


get_logger = getLogger


def attach_file(path: str | Path, level: int | str = "DEBUG") -> _standard.Handler:
    """Append every message of ``level`` or above, with date and thread, to a file.

    Returns the handler; give it to :func:`detach_file` when the run ends.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(_standard.Formatter("%(asctime)s %(levelname)-7s [%(threadName)s] %(short_name)s: %(message)s"))
    handler.addFilter(_ShortName())
    handler.setLevel(level)
    _root().addHandler(handler)
    return handler


class _LogFile(_standard.FileHandler):
    """A log file whose write errors (such as a full disk) are reported once and lose messages, but do not stop the run."""

    has_failed = False

    def handleError(self, record: _standard.LogRecord) -> None:  # noqa: N802 - the name of the standard library
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_failed:
            self.has_failed = True
            _root().warning("%s cannot be written (%s): later messages are missing from it", self.baseFilename, error)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # buffered messages could not be written
            if not self.has_failed:
                _root().warning("%s cannot be written (%s)", self.baseFilename, error)


def attached_file() -> str | None:
    """Return the path of the log file, or None if no file is attached."""
    handlers = [handler for handler in _root().handlers if isinstance(handler, _standard.FileHandler)]
    return handlers[-1].baseFilename if handlers else None


def detach_file(handler: _standard.Handler) -> None:
    """Stop writing to a file that :func:`attach_file` opened."""
    _root().removeHandler(handler)
    handler.close()
