"""Task-style workflows of several steps, rewarded step by step or by the outcome of the run."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

from rollwright.errors import WorkflowError
from rollwright.experience.experience import Experience
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.task import Task, Workflow, with_reward


class _Steps(Workflow):
    """Common base: runs steps until one returns False or ``max_step_num`` is reached.

    Args:
        task: the task to run.
        model: the policy.
        auxiliary_models: OpenAI clients of models that are not trained.
        use_openai_client: provide an OpenAI client of the policy as ``client``; needs the run's OpenAI front.
    """

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: list[Any] | None = None, use_openai_client: bool = True
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        if not use_openai_client:
            self.client: Any = None
        else:
            self.client = model.get_openai_async_client() if self.asynchronous else model.get_openai_client()

    @property
    def max_step_num(self) -> int:
        """Maximum number of steps in a run."""
        raise WorkflowError(f"{type(self).__name__} defines no max_step_num, the maximum number of steps.")

    def step(self, step_num: int) -> bool:
        """Run one step, counted from 0; return False to end the run."""
        raise WorkflowError(f"{type(self).__name__} defines no step(step_num).")

    async def step_async(self, step_num: int) -> bool:
        """Run one step; the async version of ``step``, for the Async classes."""
        raise WorkflowError(f"{type(self).__name__} defines no step_async(step_num).")

    def _steps(self) -> Iterator[list[Experience]]:
        """Run the steps, and yield the experiences of each."""
        for number in range(self.max_step_num):
            goes_on = self.step(step_num=number)
            yield self._experiences_of(number)
            if not goes_on:
                return

    async def _steps_async(self) -> AsyncIterator[list[Experience]]:
        """Run the steps with ``step_async``, and yield the experiences of each."""
        for number in range(self.max_step_num):
            goes_on = await self.step_async(step_num=number)
            yield self._experiences_of(number)
            if not goes_on:
                return

    def _experiences_of(self, step: int) -> list[Experience]:
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.eid.step = step
        return experiences


class StepWiseRewardWorkflow(_Steps):
    """Rewards each step separately. A subclass defines ``step``, ``max_step_num`` and ``reward``, which scores the calls of a step."""

    def reward(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of a step's calls."""
        raise WorkflowError(f"{type(self).__name__} defines no reward(exps, step_num).")

    def run(self) -> list[Experience]:
        """Run the steps, and reward each."""
        made: list[Experience] = []
        for number, experiences in enumerate(self._steps()):
            made += with_reward(experiences, self.reward(experiences, step_num=number))
        return made


class AsyncStepWiseRewardWorkflow(StepWiseRewardWorkflow):
    """Like ``StepWiseRewardWorkflow``, with ``step_async`` and ``reward_async``."""

    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of a step's calls."""
        raise WorkflowError(f"{type(self).__name__} defines no reward_async(exps, step_num).")

    async def run_async(self) -> list[Experience]:
        """Run the steps, and reward each."""
        made: list[Experience] = []
        number = 0
        async for experiences in self._steps_async():
            made += with_reward(experiences, await self.reward_async(experiences, step_num=number))
            number += 1
        return made


class RewardPropagationWorkflow(_Steps):
    """Gives every call the reward of the whole run. A subclass defines ``step``, ``max_step_num`` and ``reward``."""

    def reward(self, exps: list[Experience]) -> float:
        """Return the reward of the run."""
        raise WorkflowError(f"{type(self).__name__} defines no reward(exps).")

    def run(self) -> list[Experience]:
        """Run the steps, and reward all of them."""
        steps = list(self._steps())
        made = list(itertools.chain.from_iterable(steps))
        return with_reward(made, self.reward(made), actual_env_steps=len(steps))


class AsyncRewardPropagationWorkflow(RewardPropagationWorkflow):
    """Like ``RewardPropagationWorkflow``, with ``step_async`` and ``reward_async``."""

    async def reward_async(self, exps: list[Experience]) -> float:
        """Return the reward of the run."""
        raise WorkflowError(f"{type(self).__name__} defines no reward_async(exps).")

    async def run_async(self) -> list[Experience]:
        """Run the steps, and reward all of them."""
        steps = [experiences async for experiences in self._steps_async()]
        made = list(itertools.chain.from_iterable(steps))
        return with_reward(made, await self.reward_async(made), actual_env_steps=len(steps))
