"""Plays text environments: an observation is a message, a reply is an action."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rollwright.data.formats import with_system
from rollwright.environments.text_environment import StepResult, TextEnvironment
from rollwright.errors import WorkflowError
from rollwright.experience.experience import Experience
from rollwright.registry import why_not_called
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.registry import WORKFLOWS, resolve_function
from rollwright.workflows.task import ResettableWorkflow, Task, with_reward

MAX_TURNS = 20
ON_INVALID, REWARDS = ("tell", "end"), ("end", "step")


@WORKFLOWS.register_module("environment_workflow")
class EnvironmentWorkflow(ResettableWorkflow):
    """Plays one episode of an environment; the conversation is one experience, unless the chat template rewrites earlier turns.

    ``workflow_args`` may hold:

    * ``environment``: ``gymnasium`` (:class:`GymnasiumText`), ``openenv`` (:class:`OpenEnv`), or a class or function, or its name or
      import path, that is called with the task's seed and returns a :class:`TextEnvironment`, whose methods may be async;
    * ``environment_args``: its further arguments; a task's column of that name overrides single ones;
    * ``max_turns`` (20): maximum number of replies;
    * ``system_prompt``: by default the environment's ``instructions``; an empty string omits it;
    * ``on_invalid`` (``tell``): answer a reply that is no valid action with the reason and the observation; ``end`` ends the episode;
    * ``invalid_reward`` (0): reward of such a reply;
    * ``rewards`` (``end``): all tokens get the sum of the episode's rewards. With ``step``, a reply gets the rewards from its step on.

    A task's seed is its column ``seed``; without it, its ordinal. All samples of a task play the same episode.
    """

    def reset(self, task: Task) -> None:
        """Take the next task."""
        self.task = task
        self.arguments = task.arguments(
            environment=None,
            environment_args={},
            max_turns=MAX_TURNS,
            system_prompt=None,
            on_invalid="tell",
            invalid_reward=0.0,
            rewards="end",
        )
        for name, known in (("on_invalid", ON_INVALID), ("rewards", REWARDS)):
            if self.arguments[name] not in known:
                raise WorkflowError(f"environment_workflow: {name} is {self.arguments[name]!r}; choose {' or '.join(known)}.")
        if self.arguments["max_turns"] < 1:
            raise WorkflowError(f"environment_workflow: max_turns is {self.arguments['max_turns']}; allow at least one reply.")

    async def run_async(self) -> list[Experience]:
        """Play until the environment ends the episode, or until the turns or the context are used up."""
        environment = await self._environment()
        try:
            return await self._play(environment)
        finally:
            if callable(close := getattr(environment, "close", None)):
                await _value(close())

    async def _play(self, environment: TextEnvironment) -> list[Experience]:
        prompt = self.arguments["system_prompt"]
        system = getattr(environment, "instructions", "") if prompt is None else prompt
        messages = with_system([{"role": "user", "content": await _value(environment.observation())}], system)
        rewards: list[float] = []
        invalid, done = 0, False
        async for reply in self.model.replies(messages, self.arguments["max_turns"]):
            result: StepResult = await _value(environment.step(reply.response_text or ""))
            valid, done = bool(result.info.get("valid", True)), result.done
            rewards.append(result.reward if valid else self.arguments["invalid_reward"])
            invalid += not valid
            if done or (not valid and self.arguments["on_invalid"] == "end"):
                break
            reason = result.info.get("reason", "This action is not possible.")
            messages.append({"role": "user", "content": result.observation if valid else f"{reason}\n{result.observation}"})
        figures = {"turns": len(rewards), "invalid_actions": invalid, "finished": float(done)}
        get_tracker("rollout").scalar(**figures)
        experiences = with_reward(self.model.extract_experience_from_history(), sum(rewards), **figures)
        return experiences if self.arguments["rewards"] == "end" else with_step_rewards(experiences, rewards)

    async def _environment(self) -> TextEnvironment:
        factory = self.arguments["environment"]
        if factory is None:
            raise WorkflowError(
                "environment_workflow: workflow_args names no environment; set it to gymnasium, or to the import path of a class."
            )
        make: Callable[..., Any] = resolve_function(factory, "environment")
        row = self.task.raw_task
        seed = row.get("seed", self.task.index)
        arguments = {**self.arguments["environment_args"], **(row.get("environment_args") or {})}
        if why := why_not_called(make, seed, **arguments):
            raise WorkflowError(
                f"environment {factory!r} cannot be made from the task's seed and environment_args ({', '.join(arguments) or 'none'}): {why}."
            )
        environment = await _value(make(seed, **arguments))
        if missing := [name for name in ("observation", "step") if not callable(getattr(environment, name, None))]:
            raise WorkflowError(
                f"environment {factory!r} made a {type(environment).__name__}, which has no {missing[0]}(): it needs observation() and "
                "step(action) (rollwright.environments.text_environment)."
            )
        return environment


async def _value(result: Any) -> Any:
    """Return a result, awaited if the environment's method is async."""
    return await result if inspect.isawaitable(result) else result


def with_step_rewards(experiences: list[Experience], rewards: Sequence[float]) -> list[Experience]:
    """Credit each reply with the rewards from its step on. Row rewards stay the episode's sum, so figures and baselines count it all.

    A token's return is the row's reward plus the token rewards from it on (``docs/algorithms.md``). A reply gets the reward of its step;
    the last reply of a row gets the negative sum of all earlier steps, so that their rewards are not credited to later replies.

    Args:
        experiences: an episode's experiences, with its sum of rewards; changed in place.
        rewards: reward of each reply.

    Raises:
        WorkflowError: the experiences do not consist of that many replies.
    """
    ends = [_reply_ends(experience) for experience in experiences]
    if sum(map(len, ends)) != len(rewards):
        raise WorkflowError(
            f"rewards: step needs a reward for each reply: {len(rewards)} steps, {sum(map(len, ends))} replies in the history."
        )
    step = 0
    for experience, positions in zip(experiences, ends, strict=True):
        experience.token_rewards = torch.zeros(experience.action_mask.shape)
        for position in positions[:-1]:
            experience.token_rewards[position] = rewards[step]
            step += 1
        experience.token_rewards[positions[-1]] = -sum(rewards[:step])
        step += 1
    return experiences


def _reply_ends(experience: Experience) -> list[int]:
    mask = experience.action_mask.long()
    after = torch.cat([mask[1:], torch.zeros(1, dtype=torch.long)])
    return torch.nonzero((mask == 1) & (after == 0)).flatten().tolist()
