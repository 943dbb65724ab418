"""Runs task-style workflows as episodes: the bridge from ``run()`` to the one executor.

What a time limit can do: model calls of a timed-out sample raise, so code that asks the model again ends; code that never
does cannot be killed, because a Python thread cannot be. Its thread is abandoned and replaced, and too many abandoned
threads stop the run.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import TasksetConfig
from rollwright.errors import RolloutError
from rollwright.experience.contract import Trajectory
from rollwright.experience.durable import EPISODE
from rollwright.experience.experience import Experience
from rollwright.inference.engine import InferenceEngine
from rollwright.processes.sandbox import sandbox_name, sandboxed
from rollwright.tracking.logging import getLogger
from rollwright.workflows.base import RolloutWorkflow, SampleBoundEngine
from rollwright.workflows.isolation import IsolatedWorkflows
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.task import Task, WorkflowPool, class_trait, returned_experiences

logger = getLogger("tasks")


class TaskRunner(RolloutWorkflow):
    """Turns each row into a task, builds or resets its workflow, and runs it.

    Args:
        tasksets: the tasksets that rows come from; a row's ``"taskset"`` names its own, the first is the default.
        tokenizer: the policy's tokenizer.
        gconfig: generation arguments of tasksets that have none of their own; None: the defaults.
        n_samples: samples of a task whose taskset sets no ``group_size``; None: the tasksets' ``gconfig.n_samples``.
        is_eval: tasks are evaluation.
        services: what runs beside the run: its ``openai_front``, at which samples' OpenAI clients are recorded (None: there
            are no such clients), and its ``auxiliary_models``, OpenAI clients of models that are not trained. They are started
            here and live as long as this object.
        max_abandoned_threads: threads that may hang before the run is stopped.
        model_path: where the policy's weights came from.
        feedback: told the ordinal and the mean reward of every task that was run.
        overflow_reward: of a sample that raised because its conversation outgrew the context; what it asked before is kept.
    """

    def __init__(
        self,
        tasksets: Sequence[TasksetConfig],
        tokenizer: Any,
        *,
        gconfig: GenerationHyperparameters | None = None,
        n_samples: int | None = None,
        is_eval: bool = False,
        services: Any = None,
        max_abandoned_threads: int = 16,
        model_path: str = "",
        feedback: Callable[[int, float], None] | None = None,
        overflow_reward: float = 0.0,
    ) -> None:
        self.overflow_reward = overflow_reward
        self.feedback = feedback
        self.tasksets = {taskset.name: taskset for taskset in tasksets}
        self.default_taskset = tasksets[0]
        self.tokenizer = tokenizer
        self.gconfig = gconfig
        self.n_samples = n_samples
        self.is_eval = is_eval
        self.services = services
        self.auxiliary_models = [] if services is None else list(services.auxiliary_models)
        self.openai_front = None if services is None else services.openai_front
        self.model_path = model_path
        self.threads = AbandonableThreads(max_abandoned_threads)
        self._workflows = WorkflowPool()
        self._delivers_one: dict[type, bool] = {}  # by workflow class: whether a run delivers one sample, or several
        self._processes: dict[str, IsolatedWorkflows] = {}

    def task_of(self, data: dict[str, Any]) -> Task:
        """The task of a row."""
        taskset = self._taskset_of(data)
        task = Task.from_row(data, taskset, is_eval=self.is_eval)
        task.rollout_args = self.generation_of(taskset)
        return task

    def _taskset_of(self, data: dict[str, Any]) -> TasksetConfig:
        return self.tasksets.get(data.get("taskset", ""), self.default_taskset)

    def generation_of(self, taskset: TasksetConfig) -> GenerationHyperparameters:
        """The generation arguments of a taskset's tasks: its own where it sets any."""
        return (taskset.gconfig or self.gconfig or GenerationHyperparameters()).new()

    def first_runs(self, data: dict[str, Any]) -> list[int]:
        """The samples that each first run of this row's workflow is asked for: all in one run, or one in each.

        A run that delivers fewer is followed by further ones, until the group is full. So what a class declares (``repeatable``,
        or ``can_repeat``, which means the opposite) is a first guess; what its runs delivered counts afterwards.
        """
        task = self.task_of(data)
        samples, kind = self._samples(task), task.workflow_class()
        one_each = self._delivers_one.get(kind)
        if one_each is None and hasattr(kind, "can_repeat"):
            one_each = not class_trait(kind, "can_repeat", task)
        elif one_each is None:
            one_each = class_trait(kind, "repeatable", task)
        return [1] * samples if one_each else [samples]

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Experience] | None:
        """Run the row's workflow once."""
        task, taskset = self.task_of(data), self._taskset_of(data)
        kind = task.workflow_class()
        asked = engine.samples_asked if isinstance(engine, SampleBoundEngine) else self.first_runs(data)[0]
        task.rollout_args = task.rollout_args.new(n_samples=asked)
        name = f"{kind.__name__} of task {task.task_id}"
        model = self._model(engine, task)
        try:
            if taskset.isolation == "process":
                if taskset.name not in self._processes:
                    self._processes[taskset.name] = IsolatedWorkflows(self.tokenizer, taskset.isolated_processes)
                experiences = await self._processes[taskset.name].run(
                    task,
                    engine,
                    model,
                    auxiliary_models=self.auxiliary_models,
                    has_front=self.openai_front is not None,
                    template_kwargs=task.format_args.template_variables,
                )
            elif class_trait(kind, "asynchronous", task):
                with self._workflows.workflow(task, model, lambda: self.auxiliary_models, taskset.name) as workflow:
                    experiences = returned_experiences(name, await workflow.run_async(), task.is_eval)
            else:
                experiences = await self.threads.run(partial(self._run_in_thread, taskset, task, model, name), name=name)
        except RolloutError:
            raise
        except Exception as error:  # whatever a client or a framework makes of the refusal
            experiences = model.experiences_cut_short(self.overflow_reward)
            if not experiences:
                raise
            logger.warning("%s outgrew the context, and ended with %s: %s", name, type(error).__name__, error)
        finally:
            model.close()
        if experiences:
            numbers = self._note_samples(kind, asked, experiences)
            if isinstance(engine, SampleBoundEngine):
                engine.sample_of_row = numbers
        self._tell(task, [e.reward for e in experiences or [] if e.reward is not None])
        return experiences

    def ran_elsewhere(self, data: dict[str, Any], asked: int, rows: Trajectory) -> None:
        """Note an episode that another process ran: how many samples its class delivers, and its reward.

        Args:
            data: the row.
            asked: samples that the workflow was asked for.
            rows: that it became, with ``sample_ids`` that count from 0.
        """
        task = self.task_of(data)
        self._note(task.workflow_class(), asked, int(rows["sample_ids"].max()))
        self._tell(task, rows["rewards"].tolist())

    def _tell(self, task: Task, rewards: Sequence[float]) -> None:
        if self.feedback is not None and rewards and task.index is not None:
            self.feedback(task.index, sum(rewards) / len(rewards))

    def _model(self, engine: InferenceEngine, task: Task) -> ModelWrapper:
        template_kwargs = task.format_args.template_variables
        front = self.openai_front
        open_episode = front and partial(front.episode, engine, gconfig=task.rollout_args, template_kwargs=template_kwargs)
        return ModelWrapper(
            engine,
            self.tokenizer,
            gconfig=task.rollout_args,
            recorder=engine.recorder,
            loop=asyncio.get_running_loop(),
            open_episode=open_episode,
            model_path=self.model_path,
            template_kwargs=template_kwargs,
        )

    def _run_in_thread(self, taskset: TasksetConfig, task: Task, model: ModelWrapper, name: str) -> list[Experience] | None:
        """Build (or reset) and run: a workflow that is heavy to build holds nobody up."""
        with self._workflows.workflow(task, model, lambda: self.auxiliary_models, taskset.name) as workflow:
            return returned_experiences(name, workflow.run(), task.is_eval)

    def _samples(self, task: Task) -> int:
        return task.repeat_times or self.n_samples or task.rollout_args.n_samples

    def _note_samples(self, kind: type, asked: int, experiences: list[Experience]) -> list[int]:
        """The sample of each experience; how many one run of the class delivers is remembered for its next tasks."""
        samples = sample_numbers(experiences, asked, delivers_one=self._delivers_one.get(kind))
        self._note(kind, asked, max(samples))
        return samples

    def _note(self, kind: type, asked: int, last: int) -> None:
        """Remember how many samples one run of a class delivers, where that tells: it was asked for ``asked``, and ``last`` is the
        number of the last."""
        if asked > 1 or last > 0:
            self._delivers_one[kind] = last == 0


def sample_numbers(experiences: Sequence[Experience], asked: int, delivers_one: bool | None = None) -> list[int]:
    """Which sample each experience of a run belongs to, counted from 0: a run may deliver several, and a sample several.

    Runs that the workflow numbered (``eid.run``) are samples. Otherwise a sample begins where the first prompt comes again, at
    the same step (``eid.step``).

    Args:
        experiences: what the run returned.
        asked: samples that it was asked for. As many experiences, of different prompts and of one step, are as many samples.
        delivers_one: what is known of the workflow: one sample a run (True), or several.
    """
    runs = list(dict.fromkeys(experience.eid.run for experience in experiences))
    if len(runs) > 1:
        return [runs.index(experience.eid.run) for experience in experiences]
    first = experiences[0]
    begins = [
        experience.eid.step == first.eid.step and torch.equal(experience.prompt_tokens, first.prompt_tokens)
        for experience in experiences
    ]
    has_steps = any(experience.eid.step != first.eid.step for experience in experiences)
    if sum(begins) == 1 and len(experiences) == asked and not has_steps and not delivers_one:
        return list(range(asked))
    return [count - 1 for count in itertools.accumulate(begins)]


class AbandonableThreads:
    """Runs synchronous code in threads that can be left behind when the code does not end."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._running: set[Future[Any]] = set()

    @property
    def abandoned(self) -> int:
        """Threads that were left behind and have not ended."""
        return sum(outcome.cancelled() for outcome in list(self._running))

    async def run(self, function: Callable[[], Any], name: str) -> Any:
        """Await ``function()`` in a daemon thread of its own.

        Raises:
            RolloutError: more threads hang than the limit allows.
        """
        if self.abandoned >= self.limit:
            raise RolloutError(
                f"{self.abandoned} workflow threads do not end after their time limit (the last: {name}). A Python thread cannot "
                "be killed: give the code a limit of its own, or run the workflow with isolation: process."
            )
        outcome: Future[Any] = Future()
        sandbox, episode = sandbox_name(), EPISODE.get()

        def call() -> None:
            result, error = None, None
            EPISODE.set(episode)
            try:
                with sandboxed(sandbox):
                    result = function()
            except StopIteration:  # no future of asyncio takes it
                error = RuntimeError(f"{name} raised StopIteration")
            except BaseException as raised:  # handed over whole: the awaiting sample reports it
                error = raised
            self._running.discard(outcome)
            if outcome.set_running_or_notify_cancel():  # it was not given up
                if error is not None:
                    outcome.set_exception(error)
                else:
                    outcome.set_result(result)

        self._running.add(outcome)
        threading.Thread(target=call, name=name, daemon=True).start()
        try:
            return await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            if outcome.cancelled():
                logger.warning("%s did not end in time: its thread is left behind (%d such)", name, self.abandoned)
            raise
