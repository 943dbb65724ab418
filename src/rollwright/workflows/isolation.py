"""Task workflows in processes of their own, which can be killed: ``isolation: process`` of a taskset.

A process runs one task at a time and is used again. Where its sample is cancelled (its time limit, a group that is given up) it
is killed with all that it started, and the next task gets a new one. It is owned by a thread, which starts it and reads what
it says, so that the kernel ends it with us, however we end.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, BinaryIO, cast

import cloudpickle

from rollwright.errors import WorkflowError
from rollwright.experience.experience import Experience
from rollwright.inference.engine import InferenceEngine
from rollwright.rewards.worker import read_frame, write_frame
from rollwright.tracking.logging import getLogger
from rollwright.workflows import isolated_frames as frames
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task import Task

logger = getLogger("isolation")


class IsolatedProcess:
    """One process, used by one event loop.

    Args:
        loop: that model calls are made on.
        tokenizer: the policy's; the process gets a copy.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tokenizer: Any) -> None:
        self.loop = loop
        self.ready: asyncio.Future[None] = loop.create_future()
        self.is_over = False
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._result: asyncio.Future[list[Experience] | None] | None = None
        self._model: ModelWrapper | None = None
        self._engine: InferenceEngine | None = None
        self._context = contextvars.copy_context()
        self._calls: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._own, name="isolated workflow", daemon=True).start()

    async def run(self, job: dict[str, Any], engine: InferenceEngine, model: ModelWrapper) -> list[Experience] | None:
        """Run one task; its model calls are answered by ``engine``.

        Raises:
            WorkflowError: the workflow raised, or its process died.
        """
        await self.ready
        self._engine, self._model, self._context = engine, model, contextvars.copy_context()
        self._result = self.loop.create_future()
        try:
            body = cloudpickle.dumps(job)
        except Exception as error:
            raise WorkflowError(
                f"task {job['task'].task_id!r} cannot be handed to a process of its own ({type(error).__name__}: {error}): keep to "
                "data in its row and workflow_args, or use isolation: thread."
            ) from error
        self._send(frames.RUN, body)
        return await self._result

    def kill(self) -> None:
        """End the process and everything that it started."""
        self.is_over = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    # -- the thread that owns the process ------------------------------------------------------------------------------

    def _own(self) -> None:
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        command = [sys.executable, "-P", "-m", "rollwright.workflows.isolated_child"]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        process = self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        start = {
            "parent": os.getpid(),
            "path": list(sys.path),
            "plugin_directories": [str(path) for path in WORKFLOWS.plugin_directories],
            "tokenizer": pickle.dumps(self._tokenizer),
        }
        try:
            self._send(frames.START, pickle.dumps(start))
            while True:
                kind, body = read_frame(cast(BinaryIO, process.stdout))
                self.loop.call_soon_threadsafe(self._heard, kind, body)
        except (EOFError, OSError, ValueError):
            pass  # it has ended; what that means, the loop decides
        except RuntimeError:  # the loop is closed
            self.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._ended, code)

    def _send(self, kind: bytes, body: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # that it has ended is told by its thread
            write_frame(self._process.stdin, kind, body)  # type: ignore[arg-type]

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _heard(self, kind: bytes, body: bytes) -> None:
        if kind == frames.READY:
            if not self.ready.done():
                self.ready.set_result(None)
            return
        if kind == frames.ASK:
            call = self.loop.create_task(self._answer(json.loads(body)), context=self._context)
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            return
        if self._result is None or self._result.done():
            return
        if kind == frames.DONE:
            self._result.set_result(frames.unpack_experiences(body))
        else:
            text = body.decode("utf-8", "replace").rstrip()
            self._result.set_exception(WorkflowError(f"the workflow raised in its process:\n{text}"))

    def _ended(self, code: int) -> None:
        self.is_over = True
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        error = WorkflowError(f"the process of an isolated workflow died ({cause}); its standard error says more.")
        for future in (self.ready, self._result):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # somebody may have stopped waiting

    async def _answer(self, question: dict[str, Any]) -> None:
        assert self._engine is not None
        answer: dict[str, Any] = {"number": question["number"]}
        try:
            answer["value"] = await self._carry_out(question["call"], question["arguments"])
        except Exception as error:
            answer["error"] = frames.raised_document(error)
        answer["version"] = self._engine.get_version()
        self._send(frames.ANSWER, json.dumps(answer).encode())

    async def _carry_out(self, call: str, arguments: dict[str, Any]) -> Any:
        assert self._engine is not None
        assert self._model is not None
        if call == "generate":
            request = frames.document_request(arguments["request"], self._model.tokenizer)
            return frames.response_document(await self._engine.agenerate(request))
        if call == "abort":
            return self._engine.abort(arguments["rid"])
        if call == "history":
            return frames.pack_experiences(self._model.extract_experience_from_history(**arguments)).hex()
        if call == "set_reward":
            return self._model.set_reward(arguments.pop("reward"), **arguments)
        if call == "openai":
            episode = self._model.openai_episode
            return {"base_url": episode.base_url, "api_key": episode.api_key, "model_path": self._model.model_path}
        raise WorkflowError(f"an isolated workflow asked for {call!r}, which is nothing that its parent does.")


class IsolatedWorkflows:
    """The processes of one task runner.

    Args:
        tokenizer: the policy's.
        limit: processes that run at once; None: one for each CPU. Further samples wait, within their time limit.
    """

    def __init__(self, tokenizer: Any, limit: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.limit = limit or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
        self._idle: list[IsolatedProcess] = []
        self._all: set[IsolatedProcess] = set()
        self._room: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        weakref.finalize(self, _kill_all, self._all)

    async def run(
        self,
        task: Task,
        engine: InferenceEngine,
        model: ModelWrapper,
        *,
        auxiliary_models: Sequence[Any] = (),
        has_front: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[Experience] | None:
        """Run a task's workflow in a process; cancelling the call kills the process."""
        job = {
            "task": task,
            "version": engine.get_version(),
            "model_path": model.model_path,
            "template_kwargs": template_kwargs or {},
            "has_front": has_front,
            "auxiliary_models": [
                {
                    "model_path": client.model_path,
                    "base_url": str(client.base_url),
                    "api_key": client.api_key,
                    "timeout": client.timeout,
                    "max_retries": client.max_retries,
                }
                for client in auxiliary_models
            ],
        }
        async with self._semaphore():
            process = self._take()
            try:
                experiences = await process.run(job, engine, model)
            except WorkflowError:
                self._give_back(process)
                raise
            except BaseException:
                logger.info("the process of task %r is killed: its sample was ended", task.task_id)
                process.kill()
                self._give_back(process)
                raise
            self._give_back(process)
            return experiences

    def close(self) -> None:
        """Kill all processes."""
        _kill_all(self._all)
        self._idle.clear()

    def _semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._room is None or self._room[0] is not loop:  # another executor uses the runner now
            self.close()
            self._room = (loop, asyncio.Semaphore(self.limit))
        return self._room[1]

    def _take(self) -> IsolatedProcess:
        while self._idle:
            process = self._idle.pop()
            if not process.is_over:
                return process
        process = IsolatedProcess(asyncio.get_running_loop(), self.tokenizer)
        self._all.add(process)
        return process

    def _give_back(self, process: IsolatedProcess) -> None:
        if process.is_over:
            self._all.discard(process)
        else:
            self._idle.append(process)


def _kill_all(processes: set[IsolatedProcess]) -> None:
    for process in list(processes):
        process.kill()
    processes.clear()
