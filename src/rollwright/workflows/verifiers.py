"""Trains on environments of verifiers, unmodified: each runs in a process of its own, and its calls to the model are recorded."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.environments.verifiers_hub import EnvironmentHosts, spec_and_task
from rollwright.errors import ConfigError, RewardError, WorkflowError
from rollwright.inference.front.openai_front import OpenAIEpisode, OpenAIFront
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.openai_agent import FrontWorkflow
from rollwright.workflows.registry import WORKFLOWS


@WORKFLOWS.register_module("verifiers")
class VerifiersWorkflow(FrontWorkflow):
    """Lets an environment of verifiers play its task with the policy, and takes its reward.

    The tasks come from the dataset of kind ``verifiers``, which names the environment. One process holds an environment for all
    workflows and datasets of this process, in the interpreter in which it is installed, and has the rights of this process. A rollout that ends with an error,
    and one of whose reward functions raises, is a failed sample.

    Args:
        tokenizer: the policy's tokenizer, or its path.
        gconfig: generation arguments, unless the environment sets them.
        timeout: time limit of an episode, in seconds.
        model_name, front, overflow_reward: see ``FrontWorkflow``.

    Raises:
        ConfigError: ``timeout`` is not above 0.
    """

    def __init__(
        self,
        tokenizer: Any,
        gconfig: GenerationHyperparameters | None = None,
        timeout: float = 600.0,
        model_name: str = "policy",
        front: OpenAIFront | None = None,
        overflow_reward: float = 0.0,
    ) -> None:
        if timeout <= 0:
            raise ConfigError(f"VerifiersWorkflow: timeout is {timeout:g}; it is above 0.")
        super().__init__(tokenizer, gconfig, model_name, front, overflow_reward)
        self.timeout = timeout
        self.hosts = EnvironmentHosts()

    async def run_agent(self, episode: OpenAIEpisode, data: dict[str, Any]) -> float | None:
        """Play the task. Returns None if its first prompt exceeded the context.

        Raises:
            RewardError: a reward function raised, or the reward is no finite number.
            WorkflowError: the environment failed, or took too long.
            LostToolError: its process has ended.
        """
        spec, task = spec_and_task(data)
        host = await self.hosts.of(spec)
        policy = {"base_url": episode.base_url, "api_key": episode.api_key, "model": self.front.model_name}
        try:
            async with asyncio.timeout(self.timeout):
                reward, metrics = await host.run(task, **policy, seconds=self.timeout)
        except TimeoutError:
            raise WorkflowError(
                f"the environment {spec.name} took more than {self.timeout:g} s for an episode; workflow_kwargs.timeout is its limit."
            ) from None
        except (WorkflowError, RewardError) as error:
            if not episode.calls and episode.recorder.outgrew_context:
                return None  # the first prompt exceeded the context
            if isinstance(error, WorkflowError) and episode.refusals:
                raise WorkflowError(f"{error} The front refused a call: {episode.refusals[-1]}") from error
            raise
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise RewardError(f"the environment {spec.name} gave the reward {reward!r}, which is no finite number.")
        get_tracker("rollout").scalar(
            **{f"verifiers_{name}": float(value) for name, value in metrics.items() if value is not None}
        )
        return float(reward)
