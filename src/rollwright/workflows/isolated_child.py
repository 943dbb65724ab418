"""The process of isolated workflows: runs one task at a time, and asks its parent for every token.

The workflow runs in the main thread, as it would in a program of its own, ``run_async`` on an event loop there; model calls go
through an event loop in a second thread, which no workflow can block; a third one reads what the parent sends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import queue
import sys
import threading
import traceback
from collections import defaultdict
from typing import Any, BinaryIO

from rollwright.experience.experience import Experience
from rollwright.experience.recorder import Recorder
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.rewards.worker import die_with_parent, read_frame, write_frame
from rollwright.workflows import isolated_frames as frames
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.task import Task
from rollwright.workflows.task_workflow import Workflow, renew, returned_experiences, tell_group_size, trait


class Parent:
    """The other side: answers to what is asked, by number."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO) -> None:
        self.loop = asyncio.new_event_loop()
        self.tasks: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.version = 0
        self._requests, self._answers = requests, answers
        self._writing = threading.Lock()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        threading.Thread(target=self.loop.run_forever, name="model calls", daemon=True).start()
        threading.Thread(target=self._read, name="answers", daemon=True).start()

    def say(self, kind: bytes, body: bytes = b"") -> None:
        """Send one frame."""
        with self._writing:
            write_frame(self._answers, kind, body)

    async def ask(self, call: str, /, **arguments: Any) -> Any:
        """Have the parent do something; awaited on any loop.

        Raises:
            RollwrightError: what the parent raised.
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(call, arguments), self.loop))

    async def _ask(self, call: str, arguments: dict[str, Any]) -> Any:
        number = next(self._numbers)
        future = self._waiting[number] = self.loop.create_future()
        self.say(frames.ASK, json.dumps({"number": number, "call": call, "arguments": arguments}).encode())
        return await future

    def ask_from_thread(self, call: str, /, **arguments: Any) -> Any:
        """``ask`` from the workflow's own thread, which waits, whether a loop runs in it or not."""
        return asyncio.run_coroutine_threadsafe(self._ask(call, arguments), self.loop).result()

    def _read(self) -> None:
        while True:
            try:
                kind, body = read_frame(self._requests)
            except EOFError:
                os._exit(0)  # the parent is gone; a workflow that hangs must not outlive it
            if kind == frames.RUN:
                self.tasks.put(pickle.loads(body))  # noqa: S301 - from our own parent
            elif kind == frames.ANSWER:
                self.loop.call_soon_threadsafe(self._answered, json.loads(body))

    def _answered(self, answer: dict[str, Any]) -> None:
        self.version = answer["version"]
        future = self._waiting.pop(answer["number"])
        if future.done():
            return
        if "error" in answer:
            future.set_exception(frames.document_raised(answer["error"]))
        else:
            future.set_result(answer["value"])


class BridgedEngine(InferenceEngine):
    """The parent's engine; what it answers is recorded here, too, for the workflow's own history."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.recorder = Recorder()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Ask the parent."""
        document = await self.parent.ask("generate", request=frames.request_document(request))
        response = frames.document_response(document)
        self.recorder.record(request, response)
        return response

    def get_version(self) -> int:
        """Version that the parent's engine had at its last answer."""
        return self.parent.version

    def abort(self, rid: str | None = None) -> None:
        """End requests of this sample."""
        asyncio.run_coroutine_threadsafe(self.parent.ask("abort", rid=rid), self.parent.loop)

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
        from rollwright.errors import EngineError

        raise EngineError(f"a workflow called engine.{method}(): the engine it was given is bound to its sample.")


class BridgedEpisode:
    """A sample's run at the OpenAI front, which is the parent's."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        opened = parent.ask_from_thread("openai")
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
        self._parent.ask_from_thread("set_reward", reward=reward, call=call, turn=turn)

    def close(self) -> None:
        """The parent ends the run with the sample."""


class BridgedModel(ModelWrapper):
    """The model as the isolated workflow sees it; the history is the parent's, which also knows the OpenAI clients' calls."""

    parent: Parent

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """See ``ModelWrapper``."""
        data = self.parent.ask_from_thread("history", clear_history=clear_history)
        return frames.unpack_experiences(bytes.fromhex(data)) or []


def auxiliary_client(model_path: str, **settings: Any) -> Any:
    """The client of a model that is not trained, as the parent has it."""
    import openai

    client = openai.OpenAI(**settings)
    client.model_path = model_path  # type: ignore[attr-defined]
    return client


class Child:
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
        workflow = self._take(task, model, job["auxiliary_models"])
        if trait(workflow, "asynchronous"):
            result = self.loop.run_until_complete(workflow.run_async())
        else:
            result = workflow.run()
        experiences = returned_experiences(f"{type(workflow).__name__} of task {task.task_id}", result)
        if trait(workflow, "resettable"):
            self.idle[type(workflow)].append(workflow)
        return experiences

    def _take(self, task: Task, model: ModelWrapper, auxiliary: list[dict[str, Any]]) -> Workflow:
        idle = self.idle[task.workflow_class()]
        if idle:
            workflow = idle.pop()
            renew(workflow, task, model)
        else:
            workflow = task.to_workflow(model, [auxiliary_client(**settings) for settings in auxiliary])
        tell_group_size(workflow, task)
        return workflow


def main() -> None:
    """Serve tasks until the parent closes the pipe."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what a workflow prints goes to the parent's standard error, not into the answers
    sys.stdout = sys.stderr
    _, body = read_frame(requests)
    start = pickle.loads(body)  # noqa: S301 - from our own parent
    sys.path[:] = start["path"]
    die_with_parent(start["parent"])
    from rollwright.workflows.registry import WORKFLOWS

    for directory in start["plugin_directories"]:
        WORKFLOWS.add_plugin_directory(directory)
    WORKFLOWS.load_plugins()  # a task may carry what they define
    parent = Parent(requests, answers)
    child = Child(parent, pickle.loads(start["tokenizer"]))  # noqa: S301 - from our own parent
    parent.say(frames.READY)
    while True:
        job = parent.tasks.get()
        assert job is not None
        try:
            body = frames.pack_experiences(child.run(job))
        except (Exception, SystemExit):
            parent.say(frames.FAILED, traceback.format_exc().encode("utf-8", "backslashreplace"))
        else:
            parent.say(frames.DONE, body)


if __name__ == "__main__":
    main()
