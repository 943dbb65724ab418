"""Engines of the viewer: each is a process that samples calls of one run again, and ends with the page that asked for it.

The viewer itself loads no torch. At most one engine runs at a time.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rollwright.errors import DataError
from rollwright.processes.child import ChildProcess
from rollwright.viewer.run import Run

_MODULE = "rollwright.trainers.modes.again"  # imports torch, so only the process imports it
_READY, _ERROR = b"R", b"E"
#: Seconds to load a model, to answer a question, and without a question after which an engine ends.
LOADING, ANSWERING, IDLE = 600.0, 300.0, 120.0
_WAITING = 8  # questions that may wait for an engine


def models_of(run: Run) -> dict[str, str]:
    """Return the models of a run, newest first: name -> path. They are its checkpoints, and the model that it began with."""
    found = [path.parent for kind in ("config.json", "adapter_config.json") for path in run.path.glob(f"checkpoints/*/{kind}")]
    newest = sorted(set(found), key=lambda path: path.stat().st_mtime, reverse=True)
    models = {f"checkpoint {path.name}": str(path) for path in newest}
    if isinstance(first := run.config.get("actor.path"), str):
        local = Path(began_in(run), first)
        models["model that it began with"] = str(local) if local.exists() else first
    return models


def began_in(run: Run) -> str:
    """Return the directory where a run was started: the first of this one and those above the run that has its model, or else this one."""
    model = str(run.config.get("actor.path"))
    places = [Path.cwd(), *run.path.resolve().parents]
    return str(next((place for place in places if (place / model).exists()), Path.cwd()))


def why_not(run: Run) -> str:
    """Return why calls of a run cannot be sampled again; empty if they can."""
    if not run.has_journal:
        return "the run has no journal"
    if run.config.get("actor.path") is None:
        return "the stage trained no model: only stages with an actor can run their episodes again"
    return ""


class Engines:
    """Starts the engine that is asked for, and ends it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: _Engine | None = None

    def ask(self, run: Run, model: str, question: dict[str, Any]) -> dict[str, Any]:
        """Sample a call again; see ``trainers.modes.again``.

        Args:
            run: the run.
            model: path of one of ``models_of``.
            question: the fields of a ``Question``.

        Raises:
            DataError: the model cannot be loaded, or the call cannot be sampled again.
        """
        with self._lock:
            engine = self._engine
            if engine is None or not engine.is_open or engine.about != (run.path, model):
                if engine is not None:
                    engine.end()
                engine = self._engine = _Engine(run.path, model, began_in(run))
            answer = engine.put(question)
        try:
            return answer.result(LOADING + ANSWERING)
        except TimeoutError:
            self.end()
            raise DataError(f"the engine did not answer within {LOADING + ANSWERING:.0f} s, and was ended.") from None

    @property
    def is_running(self) -> bool:
        """True if an engine runs."""
        with self._lock:
            return self._engine is not None and self._engine.is_open

    def end(self) -> bool:
        """End the engine. Returns False if none runs."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is None or not engine.is_open:
            return False
        engine.end()
        return True


class _Engine:
    """A process with a model, and the thread that owns it."""

    def __init__(self, run: Path, model: str, directory: str) -> None:
        self.about = (run, model)
        self._directory = directory
        self.is_open = True
        self._questions: queue.Queue[tuple[dict[str, Any], Future[dict[str, Any]]] | None] = queue.Queue(_WAITING + 1)
        self._child: ChildProcess | None = None
        self._thread = threading.Thread(target=self._run, name="rollwright-view-engine", daemon=True)
        self._thread.start()

    def put(self, question: dict[str, Any]) -> Future[dict[str, Any]]:
        """Add a question; return its answer to come."""
        answer: Future[dict[str, Any]] = Future()
        try:
            self._questions.put_nowait((question, answer))
        except queue.Full:
            raise DataError("the engine has many questions to answer: try again in a moment.") from None
        return answer

    def end(self) -> None:
        """Kill the process, and wait for the thread to end."""
        self.is_open = False
        if (child := self._child) is not None:
            child.kill()
        with contextlib.suppress(queue.Full):
            self._questions.put_nowait(None)
        self._thread.join(10.0)

    def _run(self) -> None:
        setup = {"run": str(self.about[0].resolve()), "model": self.about[1], "directory": self._directory}
        child = self._child = ChildProcess(_MODULE, setup)
        why = "the engine was ended."
        answer: Future[dict[str, Any]] | None = None
        try:
            kind, body = child.channel.receive(LOADING)
            if kind != _READY:
                why = body.decode()
            while kind == _READY and self.is_open:
                asked = self._questions.get(timeout=IDLE)
                if asked is None:
                    break
                question, answer = asked
                child.channel.send(b"Q", pickle.dumps(question))
                said, body = child.channel.receive(ANSWERING)
                if said == _ERROR:
                    answer.set_exception(DataError(body.decode()))
                else:
                    answer.set_result(json.loads(body))
                answer = None
        except queue.Empty:
            pass  # nobody asks any more
        except (EOFError, OSError) as error:
            if self.is_open:
                is_late = isinstance(error, TimeoutError)
                ended = "did not answer in time." if is_late else f"ended: {child.cause_of_death()}; see the viewer's output."
                why = f"the engine {ended}"
        finally:
            self.is_open = False
            child.close()
            if answer is not None:
                answer.set_exception(DataError(why))
            with contextlib.suppress(queue.Empty):
                while True:
                    if (left := self._questions.get_nowait()) is not None:
                        left[1].set_exception(DataError(why))
