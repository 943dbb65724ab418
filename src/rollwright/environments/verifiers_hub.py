"""Environments of verifiers: a process of their own interpreter for each, and the dataset ``verifiers``, which lists their tasks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import tempfile
import threading
import weakref
from collections.abc import Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollwright.data.rows import Row
from rollwright.data.splits import check_split, split_of
from rollwright.environments.verifiers_host import FAILED, LINE_BYTES
from rollwright.errors import DataError, LostToolError, RewardError, WorkflowError
from rollwright.processes.child import UNCOUNTED, ChildProcess
from rollwright.tracking.logging import getLogger

logger = getLogger("verifiers")

#: Column of a row that holds its environment and its task.
COLUMN = "verifiers"
_START_SECONDS = 600.0  # imports on a busy machine, and a dataset that is fetched
_LIST_SECONDS = 600.0
#: How long a process is kept that nobody uses: the next stage or evaluation often needs it again.
KEPT_SECONDS = 60.0


@dataclass(frozen=True)
class EnvironmentSpec:
    """Which environment, and where it runs.

    Attributes:
        name: name of its package, as ``vf-eval`` takes it: ``reverse-text``, or ``owner/reverse-text``.
        args: arguments of its ``load_environment``, or, for ``verifiers.v1``, fields of its configuration.
        python: interpreter in which it is installed. Empty: this one.
        env: environment variables of its process, besides those of the run.
    """

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    python: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Text that is equal for equal specifications."""
        return json.dumps(asdict(self), sort_keys=True)


class EnvironmentHost:
    """The process of an environment. It is started by the thread that makes this object, and ends with it.

    Args:
        spec: the environment.

    Raises:
        WorkflowError: the interpreter cannot be run.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self._directory = Path(tempfile.mkdtemp(prefix="rollwright-env-"))
        self._path = str(self._directory / "socket")
        python = str(Path(spec.python).expanduser().absolute()) if spec.python else ""
        setup = {"name": spec.name, "args": dict(spec.args), "socket": self._path}
        try:
            self._process = ChildProcess("rollwright.environments.verifiers_host", setup, python=python, env=spec.env)
        except OSError as error:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise WorkflowError(
                f"the environment {spec.name} cannot be started: {error}. Its setting python names an interpreter in which verifiers and the "
                "environment are installed."
            ) from error
        self.close = weakref.finalize(self, _end, self._process, self._directory)
        self._loading = threading.Lock()
        self._is_ready, self._fault = False, ""

    def wait(self) -> None:
        """Wait until the environment is loaded.

        Raises:
            WorkflowError: it cannot be loaded; the message says why.
        """
        with self._loading:
            if not self._is_ready and not self._fault:
                try:
                    self._receive_readiness()
                    self._is_ready = True
                except WorkflowError as error:
                    self._fault = str(error)
        if self._fault:
            raise WorkflowError(self._fault)

    def _receive_readiness(self) -> None:
        name, where = self.spec.name, self.spec.python or "this interpreter"
        try:
            kind, said = self._process.channel.receive(_START_SECONDS)
        except (EOFError, TimeoutError) as error:
            how = self._process.cause_of_death() if isinstance(error, EOFError) else f"no answer within {_START_SECONDS:g} s"
            raise WorkflowError(f"the environment {name} did not start ({how}) in {where}; its output is in the log.") from None
        if kind == FAILED:
            raise WorkflowError(
                f"the environment {name} cannot be loaded in {where}: {said.decode()}. Install verifiers and the environment there, and "
                "name the interpreter in kwargs.python of the dataset."
            )

    def tasks(self, split: str) -> tuple[list[dict[str, Any]], bool]:
        """Return the environment's rows of a split, and whether the environment keeps splits apart.

        Raises:
            WorkflowError: the environment raised, or took too long.
            LostToolError: its process has ended.
        """
        self.wait()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_LIST_SECONDS)
            try:
                connection.connect(self._path)
                connection.sendall(json.dumps({"do": "tasks", "split": split}).encode() + b"\n")
                with connection.makefile("rb") as answers:
                    answer = answers.readline()
            except TimeoutError:
                raise WorkflowError(
                    f"the environment {self.spec.name} did not list its tasks within {_LIST_SECONDS:g} s."
                ) from None
            except OSError as error:
                raise self._lost() from error
        result = self._result(answer)
        return result["tasks"], result["keeps_splits"]

    async def run(self, task: Mapping[str, Any], **connection: Any) -> tuple[float, dict[str, float]]:
        """Play a task.

        Args:
            task: the environment's row.
            connection: ``base_url``, ``api_key`` and ``model`` of the policy, and ``seconds``, the time limit of its answers.

        Returns:
            The reward, and the environment's metrics by name.

        Raises:
            RewardError: a reward function raised.
            WorkflowError: the environment raised.
            LostToolError: its process has ended.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=LINE_BYTES)
            try:
                writer.write(json.dumps({"do": "run", "task": task, **connection}).encode() + b"\n")
                await writer.drain()
                answer = await reader.readline()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        except OSError as error:
            raise self._lost() from error
        result = self._result(answer)
        return result["reward"], result["metrics"]

    def _result(self, answer: bytes) -> dict[str, Any]:
        if not answer.endswith(b"\n"):
            raise self._lost()
        result = json.loads(answer)
        if "failure" in result:
            kind = RewardError if result["failure"] == "reward" else WorkflowError
            raise kind(f"the environment {self.spec.name}: {result['said']}. Its log has the traceback.")
        return result

    def _lost(self) -> LostToolError:
        self.close()
        return LostToolError(f"the process of the environment {self.spec.name} has ended; its output is in the log.")

    @property
    def is_lost(self) -> bool:
        """True if the process was found to have ended."""
        return not self.close.alive

    @property
    def is_usable(self) -> bool:
        """True unless the process has ended or could not load its environment."""
        return self.close.alive and not self._fault and self._process.is_running


def _end(process: ChildProcess, directory: Path) -> None:
    process.close()
    shutil.rmtree(directory, ignore_errors=True)


_SHARED: weakref.WeakValueDictionary[str, EnvironmentHost] = weakref.WeakValueDictionary()
_SHARING = threading.Lock()
_STARTER = ThreadPoolExecutor(1, "environments")  # a process ends with the thread that started it, and this one does not end


def shared_host(spec: EnvironmentSpec) -> EnvironmentHost:
    """Return the process of an environment, which all its users in this process share. It is started if there is none.

    Raises:
        WorkflowError: the interpreter cannot be run.
    """
    with _SHARING:
        host = _SHARED.get(spec.key)
        if host is None or not host.is_usable:
            host = _SHARED[spec.key] = _STARTER.submit(EnvironmentHost, spec).result()
        return host


def _keep(hosts: MutableMapping[str, Any]) -> None:
    """Drop processes that are no longer used here in a while, unless they have another user by then."""
    timer = threading.Timer(KEPT_SECONDS, hosts.clear)
    timer.daemon = True
    timer.start()


class EnvironmentHosts:
    """The processes of the environments that a workflow plays; each is shared, and started when the first episode needs it."""

    def __init__(self) -> None:
        self._hosts: dict[str, tuple[EnvironmentHost, asyncio.Future[None]]] = {}
        weakref.finalize(self, _keep, self._hosts).atexit = False

    async def of(self, spec: EnvironmentSpec) -> EnvironmentHost:
        """Return the process of an environment, and wait until it is loaded. Called on one event loop.

        Raises:
            WorkflowError: it cannot be loaded.
        """
        host, loaded = self._hosts.get(spec.key, (None, None))
        if host is None or loaded is None or host.is_lost:
            host = shared_host(spec)
            loaded = asyncio.ensure_future(asyncio.to_thread(host.wait))
            self._hosts[spec.key] = host, loaded
        with UNCOUNTED.get().passing():
            await asyncio.shield(loaded)
        return host


# -- the dataset ---------------------------------------------------------------------------------------------------------


def verifiers(
    split: str = "train",
    path: str = "",
    args: Mapping[str, Any] | None = None,
    python: str = "",
    env: Mapping[str, str] | None = None,
) -> list[Row]:
    """List the tasks of an environment.

    If the environment has no evaluation dataset, a hash of each task assigns it to the train (80 %), valid or test split.

    Args:
        split: train, or valid or test, which are the environment's evaluation dataset if it has one.
        path, args, python, env: the environment; see ``EnvironmentSpec``.

    Returns:
        Rows ``{"messages", "answer", "query_id", "verifiers": {"environment": …, "task": the environment's row}}``.

    Raises:
        DataError: there is no such split, or the environment cannot be loaded or listed.
    """
    check_split("verifiers", split)
    if not path:
        raise DataError("verifiers: path names no environment; give the name of its package, such as reverse-text.")
    spec = EnvironmentSpec(path, dict(args or {}), python, dict(env or {}))
    try:
        host = shared_host(spec)
        _keep({spec.key: host})
        tasks, keeps_splits = host.tasks(split)
    except (WorkflowError, LostToolError) as error:
        raise DataError(str(error)) from error
    chosen = [(number, task) for number, task in enumerate(tasks) if keeps_splits or split_of(_identity(task)) == split]
    if not chosen:
        raise DataError(f"the environment {path} has no tasks in split {split!r} (it has {len(tasks)} in all).")
    part = "eval" if keeps_splits and split != "train" else "train"
    return [_row(spec, task, f"{path}/{part}/{number}") for number, task in chosen]


def _identity(task: Mapping[str, Any]) -> str:
    """What makes a task another task: everything but its number."""
    return json.dumps({key: value for key, value in task.items() if key not in ("example_id", "idx")}, sort_keys=True)


def _row(spec: EnvironmentSpec, task: Mapping[str, Any], name: str) -> Row:
    prompt = task.get("prompt") or []
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if task.get("system_prompt"):
        messages.insert(0, {"role": "system", "content": task["system_prompt"]})
    row = {"messages": messages, "query_id": name, COLUMN: {"environment": asdict(spec), "task": dict(task)}}
    return row | ({"answer": task["answer"]} if task.get("answer") else {})


def spec_and_task(data: Mapping[str, Any]) -> tuple[EnvironmentSpec, dict[str, Any]]:
    """Return the environment of a row and the environment's own row.

    Raises:
        WorkflowError: the row is not one of the dataset ``verifiers``.
    """
    column = data.get(COLUMN)
    if not isinstance(column, Mapping):
        raise WorkflowError(
            "the task has no environment of verifiers: set the dataset's kind to verifiers and its path to the environment's name."
        )
    return EnvironmentSpec(**column["environment"]), dict(column["task"])
