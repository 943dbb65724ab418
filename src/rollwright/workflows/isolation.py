"""Runs task workflows in separate processes, which can be killed (``isolation: process`` of a taskset).

A process runs one task at a time and is reused. If its sample is cancelled, it is killed with all its children. The workflow runs
in the main thread; model calls go through an event loop in a second thread, which no workflow can block; a third thread reads the
parent's messages.

The parent sends ``RUN`` (a task) and ``ANSWER``, both pickled. The child sends ``READY``, ``ASK`` (JSON), ``DONE`` (experiences in
safetensors bytes) and ``FAILED`` (a traceback). Nothing that the child sends is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import os
import pickle
import queue
import threading
import traceback
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import cloudpickle

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError, RollwrightError, WorkflowError
from rollwright.experience.experience import Experience
from rollwright.experience.recorder import Recorder
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.processes.child import UNCOUNTED, Channel, ChildProcess, connect
from rollwright.processes.pool import START_SECONDS, processor_count
from rollwright.processes.sandbox import sandbox_name, sandboxed
from rollwright.tracking.logging import getLogger
from rollwright.workflows.base import SampleBoundEngine
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task import Task, WorkflowPool, returned_experiences, trait

logger = getLogger("isolation")

RUN, ANSWER, READY, ASK, DONE, FAILED = b"U", b"A", b"R", b"Q", b"D", b"F"
_SENT_FIELDS = (
    *("input_ids", "rid", "metadata", "seed", "position_ids", "branch_ids", "lora_name"),
    *("top_logprobs", "prompt_logprobs_from"),
)


class IsolatedWorkflows:
    """The processes of one task runner.

    Args:
        tokenizer: the policy's tokenizer.
        limit: maximum number of processes that run at once. Default: one per processor. Further samples wait; their time limit
            includes the wait.
    """

    def __init__(self, tokenizer: Any, limit: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.limit = limit or processor_count()
        self._idle: list[IsolatedProcess] = []
        self._all: set[IsolatedProcess] = set()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
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
            "sandbox": sandbox_name(),
            "model_path": model.model_path,
            "template_kwargs": template_kwargs or {},
            "has_front": has_front,
            "auxiliary_models": [
                {"base_url": str(client.base_url), **{name: getattr(client, name) for name in settings}}
                for client in auxiliary_models
            ],
        }
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:  # another executor uses the runner now
            self.close()
            self._slots = (loop, asyncio.Semaphore(self.limit))
        async with self._slots[1]:
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
    """One process, used by one event loop. A thread starts the process and reads its messages.

    Args:
        loop: event loop for model calls.
        tokenizer: the policy's tokenizer; the process gets a copy.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tokenizer: Any) -> None:
        self.loop = loop
        self.ready: asyncio.Future[None] = loop.create_future()
        self.is_over = False
        self._process: ChildProcess | None = None
        self._result: asyncio.Future[list[Experience] | None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._own, args=[tokenizer], name="isolated workflow", daemon=True).start()

    async def run(self, job: dict[str, Any], engine: InferenceEngine, model: ModelWrapper) -> list[Experience] | None:
        """Run one task; ``engine`` answers its model calls. Raises the errors of ``IsolatedWorkflows.run``."""
        with UNCOUNTED.get().passing():
            try:
                await asyncio.wait_for(asyncio.shield(self.ready), START_SECONDS)
            except TimeoutError:
                self.kill()
                raise WorkflowError(
                    f"the process of an isolated workflow was not ready after {START_SECONDS:g} s: check what its plugins import."
                ) from None
        self._engine, self._model, self._context = engine, model, contextvars.copy_context()
        self._result = self.loop.create_future()
        try:
            body = cloudpickle.dumps(job)
        except Exception as error:  # the objects of a row are pickled by code of their own
            raise WorkflowError(
                f"task {job['task'].task_id!r} cannot be handed to a process of its own ({type(error).__name__}: {error}): keep to "
                "data in its row and workflow_args, or use isolation: thread."
            ) from error
        self._send(RUN, body)
        return await self._result

    def kill(self) -> None:
        """Kill the process and all its children."""
        self.is_over = True
        if self._process is not None:
            self._process.kill()

    def _own(self, tokenizer: Any) -> None:
        """Start the process and read its messages until it ends; runs in a thread."""
        process = self._process = ChildProcess("rollwright.workflows.isolation", pickle.dumps(tokenizer))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            with contextlib.suppress(EOFError, OSError):  # the process has ended, which the loop handles
                while not self.is_over:
                    self.loop.call_soon_threadsafe(self._received, *process.channel.receive())
            self.loop.call_soon_threadsafe(self._ended, process.cause_of_death())
        process.close()

    def _send(self, kind: bytes, body: bytes) -> None:
        assert self._process is not None
        with contextlib.suppress(OSError):  # the process has ended; its thread reports that
            self._process.channel.send(kind, body)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _received(self, kind: bytes, body: bytes) -> None:
        if kind == READY:
            if not self.ready.done():
                self.ready.set_result(None)
        elif kind == ASK:
            call = self.loop.create_task(self._answer(json.loads(body)), context=self._context)
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        elif self._result is not None and not self._result.done():
            if kind == DONE:
                self._result.set_result(unpack_experiences(body))
            else:
                text = body.decode("utf-8", "replace").rstrip()
                self._result.set_exception(WorkflowError(f"the workflow raised in its process:\n{text}"))

    def _ended(self, cause: str) -> None:
        self.is_over = True
        error = WorkflowError(f"the process of an isolated workflow died ({cause}); its standard error says more.")
        for future in (self.ready, self._result):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved, in case nobody awaits the future

    async def _answer(self, question: dict[str, Any]) -> None:
        value: Any = None
        failure: tuple[type[RollwrightError] | None, str] | None = None
        try:
            value = await self._carry_out(question["call"], question["arguments"])
        except RollwrightError as error:
            failure = type(error), str(error)
        except Exception as error:  # raised in the process as an EngineError
            failure = None, f"{type(error).__name__}: {error}"
        self._send(ANSWER, pickle.dumps((question["number"], self._engine.get_version(), value, failure)))

    async def _carry_out(self, call: str, arguments: dict[str, Any]) -> Any:
        match call:
            case "generate":
                fields = arguments["request"]
                gconfig = GenerationHyperparameters(**fields.pop("gconfig"))
                return await self._engine.agenerate(ModelRequest(**fields, gconfig=gconfig, tokenizer=self._model.tokenizer))
            case "abort":
                return self._engine.abort(arguments["rid"])
            case "history":
                return self._model.extract_experience_from_history(**arguments)
            case "set_reward":
                return self._model.set_reward(arguments.pop("reward"), **arguments)
            case "openai":
                episode = self._model.openai_episode
                names = ("base_url", "api_key", "calls", "malformed_tool_calls")
                return {name: getattr(episode, name) for name in names} | {"model_path": self._model.model_path}
        raise WorkflowError(f"an isolated workflow asked for {call!r}, which its parent does not offer.")


# ------------------------------------------------------------------ in the process


def main() -> None:
    """Run tasks until the parent has ended."""
    channel, pickled = connect()
    WORKFLOWS.load_plugins()  # a task may refer to what they define
    parent, tokenizer = Parent(channel), pickle.loads(pickled)  # noqa: S301 - from our own parent
    loop = asyncio.new_event_loop()  # runs run_async, in this thread
    workflows = WorkflowPool()
    channel.send(READY)
    while True:
        job = parent.jobs.get()
        try:
            experiences = _run_task(pickle.loads(job), parent, tokenizer, loop, workflows)  # noqa: S301 - from our own parent
            answer = DONE, pack_experiences(experiences)
        except (Exception, SystemExit):  # whatever a workflow raises fails its task, not the process
            answer = FAILED, traceback.format_exc().encode("utf-8", "backslashreplace")
        channel.send(*answer)


def pack_experiences(experiences: Sequence[Experience] | None) -> bytes:
    """Pack experiences as a line with their lengths, followed by their bytes. None and an empty list remain distinct."""
    parts = [experience.serialize() for experience in experiences or ()]
    lengths = None if experiences is None else [len(part) for part in parts]
    return b"".join([json.dumps(lengths).encode(), b"\n", *parts])


def unpack_experiences(data: bytes) -> list[Experience] | None:
    """Unpack what ``pack_experiences`` packed."""
    line, _, content = data.partition(b"\n")
    lengths = json.loads(line)
    if lengths is None:
        return None
    ends = itertools.accumulate(lengths, initial=0)
    return [Experience.deserialize(content[start:end]) for start, end in itertools.pairwise(ends)]


class Parent:
    """Connection to the parent process: sends requests to it, and matches the answers by number."""

    def __init__(self, channel: Channel) -> None:
        self.loop = asyncio.new_event_loop()
        self.jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.version = 0
        self._channel = channel
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        threading.Thread(target=self.loop.run_forever, name="model calls", daemon=True).start()
        threading.Thread(target=self._read, name="answers", daemon=True).start()

    def ask(self, call: str, /, **arguments: Any) -> Future[Any]:
        """Send a request to the parent.

        Returns:
            A future with the answer, or with the ``RollwrightError`` that the parent raised.
        """
        number = next(self._numbers)
        future = self._waiting[number] = Future()
        self._channel.send(ASK, json.dumps({"number": number, "call": call, "arguments": arguments}).encode())
        return future

    def _read(self) -> None:
        try:
            while True:
                kind, body = self._channel.receive()
                if kind == RUN:
                    self.jobs.put(body)
                else:
                    self._answered(*pickle.loads(body))  # noqa: S301 - from our own parent
        except EOFError:
            os._exit(0)  # the parent is gone; a workflow that hangs must not outlive it

    def _answered(self, number: int, version: int, value: Any, failure: tuple[type | None, str] | None) -> None:
        self.version = version
        future = self._waiting.pop(number)
        if not future.set_running_or_notify_cancel():
            return
        if failure is None:
            future.set_result(value)
        else:
            kind, text = failure
            future.set_exception((kind or EngineError)(text))


class BridgedEngine(SampleBoundEngine):
    """Forwards requests to the parent's engine. Responses are also recorded in this process, for the workflow's own history."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.recorder: Recorder = Recorder()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Let the parent's engine answer a request.

        Raises:
            WorkflowError: the request carries images.
        """
        if request.multi_modal is not None or request.image_data is not None:
            raise WorkflowError("a workflow with isolation: process sent images to the model, which needs isolation: thread.")
        fields = {name: getattr(request, name) for name in _SENT_FIELDS}
        response = await asyncio.wrap_future(
            self.parent.ask("generate", request={**fields, "gconfig": asdict(request.gconfig)})
        )
        self.recorder.record(request, response)
        return response

    def get_version(self) -> int:
        """Return the weight version that the parent's engine had at its last answer."""
        return self.parent.version

    def abort(self, rid: str | None = None) -> None:
        """Abort requests of this sample."""
        self.parent.ask("abort", rid=rid)


class BridgedEpisode:
    """A sample's run at the parent's OpenAI front."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        opened = parent.ask("openai").result()
        self.base_url, self.api_key, self.model_path = opened["base_url"], opened["api_key"], opened["model_path"]

    @property
    def calls(self) -> list[str]:
        """Ids of the finished calls."""
        return self._parent.ask("openai").result()["calls"]

    @property
    def malformed_tool_calls(self) -> int:
        """Number of tool calls so far that could not be parsed."""
        return self._parent.ask("openai").result()["malformed_tool_calls"]

    def client(self) -> Any:
        """Make an ``openai.OpenAI`` client."""
        from rollwright.inference.front.openai_clients import RunClient

        return RunClient(self.base_url, self.api_key, self.model_path)

    def async_client(self) -> Any:
        """Make an ``openai.AsyncOpenAI`` client."""
        from rollwright.inference.front.openai_clients import AsyncRunClient

        return AsyncRunClient(self.base_url, self.api_key, self.model_path)

    def set_reward(self, reward: float, *, call: str | None = None, turn: int | None = None) -> None:
        """Set the reward of the run, or of one call or turn."""
        self._parent.ask("set_reward", reward=reward, call=call, turn=turn).result()

    def close(self) -> None:
        """Do nothing: the parent ends the run with the sample."""


class BridgedModel(ModelWrapper):
    """Model wrapper of an isolated workflow. Its history comes from the parent, which also records the calls of OpenAI clients."""

    parent: Parent

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Convert the parent's history to experiences; see ``ModelWrapper``."""
        return self.parent.ask("history", clear_history=clear_history).result()


def _run_task(
    job: dict[str, Any],
    parent: Parent,
    tokenizer: Any,
    loop: asyncio.AbstractEventLoop,
    workflows: WorkflowPool,
) -> list[Experience] | None:
    """Run the task's workflow and return its experiences."""
    task: Task = job["task"]
    parent.version = job["version"]
    engine = BridgedEngine(parent)
    model = BridgedModel(
        engine,
        tokenizer,
        gconfig=task.rollout_args,
        recorder=engine.recorder,
        loop=parent.loop,
        open_episode=(lambda: BridgedEpisode(parent)) if job["has_front"] else None,
        model_path=job["model_path"],
        template_kwargs=job["template_kwargs"],
    )
    model.parent = parent
    settings = job["auxiliary_models"]
    with (
        sandboxed(job["sandbox"]),
        workflows.workflow(task, model, lambda: [_auxiliary_client(**each) for each in settings]) as workflow,
    ):
        result = loop.run_until_complete(workflow.run_async()) if trait(workflow, "asynchronous") else workflow.run()
        return returned_experiences(f"{type(workflow).__name__} of task {task.task_id}", result, task.is_eval)


def _auxiliary_client(model_path: str, **settings: Any) -> Any:
    """Make a client for a model that is not trained, with the settings of the parent's client."""
    import openai

    client = openai.OpenAI(**settings)
    client.model_path = model_path  # type: ignore[attr-defined]
    return client
