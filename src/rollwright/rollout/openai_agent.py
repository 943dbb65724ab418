"""Any agent as a workflow: it is given a base URL and a key, and says what its run was worth."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import WorkflowError
from rollwright.experience.experience import Experience
from rollwright.inference.engine import InferenceEngine
from rollwright.rollout.openai_episode import OpenAIEpisode
from rollwright.rollout.openai_front import OpenAIFront
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.base import RolloutWorkflow
from rollwright.workflows.registry import resolve_function
from rollwright.workflows.task_runner import AbandonableThreads


class OpenAIAgentWorkflow(RolloutWorkflow):
    """Runs ``agent(data, base_url=…, api_key=…)``, and trains what it asked and was answered.

    The agent uses any OpenAI client or framework, here or in a process that it starts. What it returns is its reward: a
    number for the run; ``{call id: number}`` for single calls, whose ids are those of the responses; or None where it gave its
    rewards by ``POST {base_url}/rewards``.

    Args:
        agent: a function, plain or async, or its import path; or a class or object with a method ``run``. Plain functions run
            in threads.
        tokenizer: the policy's, or its path.
        gconfig: generation arguments that requests may leave out.
        agent_kwargs: passed to a class's constructor, or else to every call.
        model_name: the name under which the agent asks for the policy; ``default`` means it, too.
        front: an ``OpenAIFront`` to share; None: one of its own, which ends with the workflow.
    """

    def __init__(
        self,
        agent: Any,
        tokenizer: Any,
        gconfig: GenerationHyperparameters | None = None,
        agent_kwargs: dict[str, Any] | None = None,
        model_name: str = "default",
        front: OpenAIFront | None = None,
    ) -> None:
        self.agent, self.agent_kwargs = _agent(agent, agent_kwargs or {})
        self.front = front or OpenAIFront(load_tokenizer(tokenizer), model_name)
        self.gconfig = gconfig
        self.threads = AbandonableThreads(limit=16)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Experience]:
        """Run the agent once; one experience for each sequence of calls that extend one another."""
        with await asyncio.to_thread(self.front.episode, engine, gconfig=self.gconfig) as episode:
            _take_reward(episode, await self._run(episode, data))
        experiences = episode.experiences()
        if not experiences:
            raise WorkflowError(
                f"the agent ended without a model call of this run: point its OpenAI client at base_url ({episode.base_url}) with "
                "the api_key that it is given."
            )
        if episode.run_reward is None:
            raise WorkflowError(
                "the agent gave no reward: return a number, a dict of call ids and numbers, or POST to base_url + '/rewards'."
            )
        get_tracker("rollout").scalar(
            agent_model_calls=len(episode.calls),
            agent_sequences=len(experiences),
            agent_reward=episode.run_reward + sum(episode.call_rewards().values()),
        )
        return experiences

    async def _run(self, episode: OpenAIEpisode, data: dict[str, Any]) -> Any:
        arguments = {"base_url": episode.base_url, "api_key": episode.api_key, **self.agent_kwargs}
        if inspect.iscoroutinefunction(self.agent):
            return await self.agent(data, **arguments)
        return await self.threads.run(lambda: self.agent(data, **arguments), name="an agent")


def _agent(agent: Any, kwargs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What is called for each episode, and its further arguments."""
    if isinstance(agent, str):
        agent = resolve_function(agent, "agent")
    if inspect.isclass(agent):
        agent, kwargs = agent(**kwargs), {}
    run = getattr(agent, "run", agent)
    if not callable(run):
        raise WorkflowError(f"the agent is {agent!r}; give a function, or a class or object with a method run(data, …).")
    return run, kwargs


def _take_reward(episode: OpenAIEpisode, reward: Any) -> None:
    if isinstance(reward, Mapping):
        for call, value in reward.items():
            episode.set_reward(value, call=call)
    elif reward is not None:
        episode.set_reward(reward)
