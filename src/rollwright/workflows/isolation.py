"""Task workflows in processes of their own, which can be killed: ``isolation: process`` of a taskset.

A process runs one task at a time and is used again. When its sample is cancelled (its time limit, a group that is given up) it is
killed with all that it started, and the next task gets a new one. ``isolated_child`` is the other end, and says what the two
exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import pickle
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import cloudpickle

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import RollwrightError, WorkflowError
from rollwright.experience.experience import Experience
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest
from rollwright.processes.child import ChildProcess
from rollwright.processes.pool import processor_count
from rollwright.tracking.logging import getLogger
from rollwright.workflows import isolated_child as child
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.task import Task

logger = getLogger("isolation")


class IsolatedWorkflows:
    """The processes of one task runner.

    Args:
        tokenizer: the policy's.
        limit: processes that run at once; None: one for each processor. Further samples wait, within their time limit.
    """

    def __init__(self, tokenizer: Any, limit: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.limit = limit or processor_count()
        self._idle: list[IsolatedProcess] = []
        self._all: set[IsolatedProcess] = set()
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
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
        """Run a task's workflow in a process; cancelling the call kills the process.

        Raises:
            WorkflowError: the workflow raised, its process died, or the task cannot be sent to it.
        """
        settings = ("model_path", "api_key", "timeout", "max_retries")
        job = {
            "task": task,
            "version": engine.get_version(),
            "model_path": model.model_path,
            "template_kwargs": template_kwargs or {},
            "has_front": has_front,
            "auxiliary_models": [
                {"base_url": str(client.base_url), **{name: getattr(client, name) for name in settings}}
                for client in auxiliary_models
            ],
        }
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:  # another executor uses the runner now
            self.close()
            self._places = (loop, asyncio.Semaphore(self.limit))
        async with self._places[1]:
            self._idle = [process for process in self._idle if not process.is_over]
            process = self._idle.pop() if self._idle else IsolatedProcess(loop, self.tokenizer)
            self._all.add(process)
            try:
                return await process.run(job, engine, model)
            except WorkflowError:
                raise
            except BaseException:
                logger.info("the process of task %r is killed: its sample was ended", task.task_id)
                process.kill()
                raise
            finally:
                (self._all.discard if process.is_over else self._idle.append)(process)

    def close(self) -> None:
        """Kill all processes."""
        _kill_all(self._all)
        self._idle.clear()


def _kill_all(processes: set[IsolatedProcess]) -> None:
    for process in list(processes):
        process.kill()
    processes.clear()


class IsolatedProcess:
    """One process, used by one event loop. A thread owns it: starts it and reads what it sends.

    Args:
        loop: that model calls are made on.
        tokenizer: the policy's; the process gets a copy.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tokenizer: Any) -> None:
        self.loop = loop
        self.ready: asyncio.Future[None] = loop.create_future()
        self.is_over = False
        self._tokenizer = tokenizer
        self._process: ChildProcess | None = None
        self._result: asyncio.Future[list[Experience] | None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._own, name="isolated workflow", daemon=True).start()

    async def run(self, job: dict[str, Any], engine: InferenceEngine, model: ModelWrapper) -> list[Experience] | None:
        """Run one task; its model calls are answered by ``engine``. Errors are those of ``IsolatedWorkflows.run``."""
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
        self._send(child.RUN, body)
        return await self._result

    def kill(self) -> None:
        """End the process and everything that it started."""
        self.is_over = True
        if self._process is not None:
            self._process.kill()

    def _own(self) -> None:
        """In a thread: start the process and read what it sends, until it ends."""
        process = self._process = ChildProcess("rollwright.workflows.isolated_child", pickle.dumps(self._tokenizer))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            with contextlib.suppress(EOFError, OSError):  # it has ended; what that means, the loop decides
                while not self.is_over:
                    self.loop.call_soon_threadsafe(self._received, *process.channel.receive())
            self.loop.call_soon_threadsafe(self._ended, process.cause_of_death())
        process.close()

    def _send(self, kind: bytes, body: bytes) -> None:
        assert self._process is not None
        with contextlib.suppress(OSError):  # it has ended, as its thread will report
            self._process.channel.send(kind, body)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _received(self, kind: bytes, body: bytes) -> None:
        if kind == child.READY:
            if not self.ready.done():
                self.ready.set_result(None)
        elif kind == child.ASK:
            call = self.loop.create_task(self._answer(json.loads(body)), context=self._context)
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        elif self._result is not None and not self._result.done():
            if kind == child.DONE:
                self._result.set_result(child.unpack_experiences(body))
            else:
                text = body.decode("utf-8", "replace").rstrip()
                self._result.set_exception(WorkflowError(f"the workflow raised in its process:\n{text}"))

    def _ended(self, cause: str) -> None:
        self.is_over = True
        error = WorkflowError(f"the process of an isolated workflow died ({cause}); its standard error says more.")
        for future in (self.ready, self._result):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # somebody may have stopped waiting

    async def _answer(self, question: dict[str, Any]) -> None:
        value: Any = None
        failure: tuple[type[RollwrightError] | None, str] | None = None
        try:
            value = await self._carry_out(question["call"], question["arguments"])
        except RollwrightError as error:
            failure = type(error), str(error)
        except Exception as error:
            failure = None, f"{type(error).__name__}: {error}"
        self._send(child.ANSWER, pickle.dumps((question["number"], self._engine.get_version(), value, failure)))

    async def _carry_out(self, call: str, arguments: dict[str, Any]) -> Any:
        if call == "generate":
            fields = arguments["request"]
            gconfig = GenerationHyperparameters(**fields.pop("gconfig"))
            return await self._engine.agenerate(ModelRequest(**fields, gconfig=gconfig, tokenizer=self._model.tokenizer))
        if call == "abort":
            return self._engine.abort(arguments["rid"])
        if call == "history":
            return self._model.extract_experience_from_history(**arguments)
        if call == "set_reward":
            return self._model.set_reward(arguments.pop("reward"), **arguments)
        if call == "openai":
            episode = self._model.openai_episode
            return {"base_url": episode.base_url, "api_key": episode.api_key, "model_path": self._model.model_path}
        raise WorkflowError(f"an isolated workflow asked for {call!r}, which is nothing that its parent does.")
