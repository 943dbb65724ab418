"""Runs task-style workflows as episodes: connects ``run()`` to the executor.

After its time limit, a sample's model calls raise an error, so code that calls the model again ends. Code that does not call it
again cannot be killed, because Python threads cannot be. Such a thread is abandoned, and too many abandoned threads stop the run.
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
from rollwright.errors import RewardError, RolloutError, SandboxError
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
        tasksets: the tasksets that rows come from. A row names its taskset in ``"taskset"``; the default is the first one.
        tokenizer: the policy's tokenizer.
        gconfig: generation arguments of tasksets that have none.
        group_size: samples of a task whose taskset sets no ``group_size``. Default: the task's ``gconfig.n_samples``.
        is_eval: True for evaluation tasks.
        services: object with two attributes: ``openai_front`` records the calls of samples' OpenAI clients, or is None if there are
            no such clients; ``auxiliary_models`` are OpenAI clients for models that are not trained.
        max_abandoned_threads: number of hanging threads at which the run stops.
        model_path: path of the policy's initial weights.
        feedback: called after each run with the task's ordinal and the mean reward.
        overflow_reward: reward of a sample that raised because its conversation outgrew the context. Its earlier calls are kept.
    """

    def __init__(
        self,
        tasksets: Sequence[TasksetConfig],
        tokenizer: Any,
        *,
        gconfig: GenerationHyperparameters | None = None,
        group_size: int | None = None,
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
        self.group_size_by_default = group_size
        self.is_eval = is_eval
        self.services = services
        self.auxiliary_models = [] if services is None else list(services.auxiliary_models)
        self.openai_front = None if services is None else services.openai_front
        self.model_path = model_path
        self.threads = AbandonableThreads(max_abandoned_threads)
        self._workflows = WorkflowPool()
        self._delivers_one: dict[type, bool] = {}  # workflow class -> True if a run delivers one sample, False if several
        self._processes: dict[str, IsolatedWorkflows] = {}

    def task_of(self, data: dict[str, Any]) -> Task:
        """Return the task of a row."""
        taskset = self._taskset_of(data)
        task = Task.from_row(data, taskset, is_eval=self.is_eval)
        task.rollout_args = self.generation_of(taskset)
        return task

    def _taskset_of(self, data: dict[str, Any]) -> TasksetConfig:
        return self.tasksets.get(data.get("taskset", ""), self.default_taskset)

    def generation_of(self, taskset: TasksetConfig) -> GenerationHyperparameters:
        """Return the generation arguments of a taskset's tasks: its own, else the runner's."""
        return (taskset.gconfig or self.gconfig or GenerationHyperparameters()).new()

    def first_runs(self, data: dict[str, Any]) -> list[int]:
        """Return how many samples to request from each initial run of a row's workflow: all from one run, or one from each of several.

        If the runs deliver fewer samples, further runs follow until the group is full. What a class declares (``repeatable``, or
        ``can_repeat``, which means the opposite) counts only until its runs have shown how many samples they deliver.
        """
        task = self.task_of(data)
        samples = task.repeat_times or self.group_size_by_default or task.rollout_args.n_samples
        kind = task.workflow_class()
        one_each = self._delivers_one.get(kind)
        if one_each is None and hasattr(kind, "can_repeat"):
            one_each = not class_trait(kind, "can_repeat", task)
        elif one_each is None:
            one_each = class_trait(kind, "repeatable", task)
        return [1] * samples if one_each else [samples]

    @staticmethod
    def samples_in(rows: Trajectory) -> int:
        """Return the number of samples that a run delivered."""
        return int(rows["sample_ids"].unique().numel())

    @staticmethod
    def further_runs(delivered: int, missing: int) -> list[int]:
        """Return how many samples to request from each further run, from the samples last ``delivered`` and those still ``missing``."""
        return [1] * missing if delivered == 1 else [missing]

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
        except (RolloutError, RewardError, SandboxError):  # no score of the conversation, however long it was
            raise
        except Exception as error:  # clients and frameworks wrap the engine's refusal in errors of their own
            experiences = model.experiences_cut_short(self.overflow_reward)
            if not experiences:
                raise
            logger.warning("%s outgrew the context, and ended with %s: %s", name, type(error).__name__, error)
        finally:
            model.close()
        if experiences:
            numbers = sample_numbers(experiences, asked, delivers_one=self._delivers_one.get(kind))
            self._note(kind, asked, max(numbers))
            if isinstance(engine, SampleBoundEngine):
                engine.sample_of_row = numbers
        self._tell(task, [e.reward for e in experiences or [] if e.reward is not None])
        return experiences

    def ran_elsewhere(self, data: dict[str, Any], asked: int, rows: Trajectory) -> None:
        """Note how many samples an episode in another process delivered, and report its reward.

        Args:
            data: the row.
            asked: number of samples requested from the workflow.
            rows: rows of the episode, with ``sample_ids`` counted from 0.
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
        """Build or reset the workflow and run it, all in this thread, because building one may take long."""
        with self._workflows.workflow(task, model, lambda: self.auxiliary_models, taskset.name) as workflow:
            return returned_experiences(name, workflow.run(), task.is_eval)

    def _note(self, kind: type, asked: int, last: int) -> None:
        """Remember whether one run of a class delivers one sample or several, if this run shows it.

        Args:
            kind: the workflow class.
            asked: number of samples requested from the run.
            last: number of its last sample, counted from 0.
        """
        if asked > 1 or last > 0:
            self._delivers_one[kind] = last == 0


def sample_numbers(experiences: Sequence[Experience], asked: int, delivers_one: bool | None = None) -> list[int]:
    """Return the sample number, counted from 0, of each experience of a run. A run may have several samples, and a sample several
    experiences.

    If the workflow numbered its runs (``eid.run``), each of them is a sample. Otherwise, each experience with the first one's
    prompt and step (``eid.step``) begins a sample.

    Args:
        experiences: what the run returned.
        asked: number of samples requested. If the run returned exactly as many experiences, all at the same step and none repeating
            the first prompt, each is a sample of its own, unless ``delivers_one``.
        delivers_one: whether runs of this workflow deliver one sample. None if unknown.
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
    """Runs synchronous code in threads, which are abandoned if the code does not end."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._running: set[Future[Any]] = set()

    @property
    def abandoned(self) -> int:
        """Number of abandoned threads that are still running."""
        return sum(outcome.cancelled() for outcome in list(self._running))

    async def run(self, function: Callable[[], Any], name: str) -> Any:
        """Await ``function()`` in a new daemon thread.

        Raises:
            RolloutError: the number of abandoned threads has reached the limit.
        """
        if self.abandoned >= self.limit:
            raise RolloutError(
                f"{self.abandoned} workflow threads do not end after their time limit (the last: {name}). A Python thread cannot "
                "be killed: give the code a limit of its own, or run the workflow with isolation: process."
            )
        outcome: Future[Any] = Future()
        sandbox, episode = sandbox_name(), EPISODE.get()

        def call() -> None:
            EPISODE.set(episode)
            try:
                with sandboxed(sandbox):
                    hand_over = partial(outcome.set_result, function())
            except StopIteration:  # asyncio futures do not accept StopIteration
                hand_over = partial(outcome.set_exception, RuntimeError(f"{name} raised StopIteration"))
            except BaseException as error:  # raised again where the sample awaits it
                hand_over = partial(outcome.set_exception, error)
            self._running.discard(outcome)
            if outcome.set_running_or_notify_cancel():  # the sample still waits
                hand_over()

        self._running.add(outcome)
        threading.Thread(target=call, name=name, daemon=True).start()
        try:
            return await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            if outcome.cancelled():
                logger.warning("%s did not end in time: its thread is left behind (%d such)", name, self.abandoned)
            raise
