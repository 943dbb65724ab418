"""The process of isolated workflows: runs one task at a time, and asks its parent for every token.

The workflow runs in the main thread, as it would in a program of its own, ``run_async`` on an event loop there; model calls go
through an event loop in a second thread, which no workflow can block; a third one reads what the parent sends.

The parent sends ``RUN`` (a task) and ``ANSWER``, both pickled. The child sends ``READY``, ``ASK`` (JSON), ``DONE`` (experiences in
safetensors bytes) and ``FAILED`` (a traceback). Nothing that the child sends is unpickled.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import queue
import threading
import traceback
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from rollwright.errors import EngineError, WorkflowError
from rollwright.experience.experience import Experience
from rollwright.experience.recorder import Recorder
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.processes.child import Channel, connect
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task import Task, Workflow, renew, returned_experiences, tell_group_size, trait

RUN, ANSWER, READY, ASK, DONE, FAILED = b"U", b"A", b"R", b"Q", b"D", b"F"
_SENT_FIELDS = ("input_ids", "rid", "metadata", "seed", "position_ids", "branch_ids", "lora_name")


def main() -> None:
    """Serve tasks until the parent is gone."""
    channel, tokenizer = connect()
    WORKFLOWS.load_plugins()  # a task may carry what they define
    parent = Parent(channel)
    tasks = TaskProcess(parent, pickle.loads(tokenizer))  # noqa: S301 - from our own parent
    channel.send(READY)
    while True:
        job = parent.jobs.get()
        try:
            answer = DONE, pack_experiences(tasks.run(pickle.loads(job)))  # noqa: S301 - from our own parent
        except (Exception, SystemExit):
            answer = FAILED, traceback.format_exc().encode("utf-8", "backslashreplace")
        channel.send(*answer)


def pack_experiences(experiences: Sequence[Experience] | None) -> bytes:
    """A line with the lengths of experiences, then their bytes; None is kept apart from an empty list."""
    parts = [experience.serialize() for experience in experiences or ()]
    lengths = None if experiences is None else [len(part) for part in parts]
    return b"".join([json.dumps(lengths).encode(), b"\n", *parts])


def unpack_experiences(data: bytes) -> list[Experience] | None:
    """What ``pack_experiences`` packed."""
    line, _, content = data.partition(b"\n")
    lengths = json.loads(line)
    if lengths is None:
        return None
    ends = itertools.accumulate(lengths, initial=0)
    return [Experience.deserialize(content[start:end]) for start, end in itertools.pairwise(ends)]


class Parent:
    """The other side: answers to what is asked, by number."""

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
        """Have the parent do something.

        Returns:
            A future of its answer, or of the ``RollwrightError`` that it raised.
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


class BridgedEngine(InferenceEngine):
    """The parent's engine; what it answers is recorded here, too, for the workflow's own history."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.recorder: Recorder = Recorder()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Ask the parent.

        Raises:
            WorkflowError: the request carries images.
        """
        if request.multi_modal is not None or request.image_data is not None:
            raise WorkflowError(
                "a workflow with isolation: process sent images to the model, which only goes with isolation: thread."
            )
        fields = {name: getattr(request, name) for name in _SENT_FIELDS}
        response = await asyncio.wrap_future(
            self.parent.ask("generate", request={**fields, "gconfig": asdict(request.gconfig)})
        )
        self.recorder.record(request, response)
        return response

    def get_version(self) -> int:
        """Version that the parent's engine had at its last answer."""
        return self.parent.version

    def abort(self, rid: str | None = None) -> None:
        """End requests of this sample."""
        self.parent.ask("abort", rid=rid)

    def set_version(self, version: int) -> None:
        """Refused, as for every workflow."""
        self._refuse("set_version")

    def pause(self) -> None:
        """Refused: see :meth:`set_version`."""
        self._refuse("pause")

    def resume(self) -> None:
        """Refused: see :meth:`set_version`."""
        self._refuse("resume")

    def _refuse(self, method: str) -> None:
        raise EngineError(f"a workflow called engine.{method}(): the engine it was given is bound to its sample.")


class BridgedEpisode:
    """A sample's run at the OpenAI front, which is the parent's."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        opened = parent.ask("openai").result()
        self.base_url, self.api_key, self.model_path = opened["base_url"], opened["api_key"], opened["model_path"]

    def client(self) -> Any:
        """An ``openai.OpenAI``."""
        from rollwright.workflows.openai_clients import RunClient

        return RunClient(self.base_url, self.api_key, self.model_path)

    def async_client(self) -> Any:
        """An ``openai.AsyncOpenAI``."""
        from rollwright.workflows.openai_clients import AsyncRunClient

        return AsyncRunClient(self.base_url, self.api_key, self.model_path)

    def set_reward(self, reward: float, *, call: str | None = None, turn: int | None = None) -> None:
        """Reward the run, or one call or turn of it."""
        self._parent.ask("set_reward", reward=reward, call=call, turn=turn).result()

    def close(self) -> None:
        """The parent ends the run with the sample."""


class BridgedModel(ModelWrapper):
    """The model as the isolated workflow sees it; the history is the parent's, which also knows the OpenAI clients' calls."""

    parent: Parent

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """See ``ModelWrapper``."""
        return self.parent.ask("history", clear_history=clear_history).result()


class TaskProcess:
    """Runs tasks; keeps the tokenizer, and workflows that can be given their next task."""

    def __init__(self, parent: Parent, tokenizer: Any) -> None:
        self.parent = parent
        self.tokenizer = tokenizer
        self.loop = asyncio.new_event_loop()  # of run_async, in the main thread
        self.idle: dict[type, list[Workflow]] = defaultdict(list)

    def run(self, job: dict[str, Any]) -> list[Experience] | None:
        """What the task's workflow returned."""
        task: Task = job["task"]
        self.parent.version = job["version"]
        engine = BridgedEngine(self.parent)
        model = BridgedModel(
            engine,
            self.tokenizer,
            gconfig=task.rollout_args,
            recorder=engine.recorder,
            loop=self.parent.loop,
            open_episode=(lambda: BridgedEpisode(self.parent)) if job["has_front"] else None,
            model_path=job["model_path"],
            template_kwargs=job["template_kwargs"],
        )
        model.parent = self.parent
        if idle := self.idle[task.workflow_class()]:
            workflow = idle.pop()
            renew(workflow, task, model)
        else:
            workflow = task.to_workflow(model, [_auxiliary_client(**settings) for settings in job["auxiliary_models"]])
        tell_group_size(workflow, task)
        if trait(workflow, "asynchronous"):
            result = self.loop.run_until_complete(workflow.run_async())
        else:
            result = workflow.run()
        experiences = returned_experiences(f"{type(workflow).__name__} of task {task.task_id}", result)
        if trait(workflow, "resettable"):
            self.idle[type(workflow)].append(workflow)
        return experiences


def _auxiliary_client(model_path: str, **settings: Any) -> Any:
    """The client of a model that is not trained, as the parent has it."""
    import openai

    client = openai.OpenAI(**settings)
    client.model_path = model_path  # type: ignore[attr-defined]
    return client
