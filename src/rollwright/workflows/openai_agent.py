"""Workflows of agents that talk to the OpenAI front: any function, class or framework, in this process or in one that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import LostToolError, PromptTooLongError, RewardError, SandboxError, WorkflowError
from rollwright.experience.experience import Experience
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.front.openai_front import OpenAIEpisode, OpenAIFront
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.base import RolloutWorkflow
from rollwright.workflows.opponents import POLICY, Opponents
from rollwright.workflows.registry import WORKFLOWS, resolve_function
from rollwright.workflows.task_runner import AbandonableThreads

logger = getLogger("agents")


class FrontWorkflow(RolloutWorkflow):
    """Runs an agent at an ``OpenAIFront`` and trains on its calls to the policy. A subclass defines ``run_agent``.

    If the conversation exceeds the context, the client gets status 400 with ``code: context_length_exceeded``. Earlier calls are
    kept and marked as truncated; if the agent then raises or returns no reward, the reward is ``overflow_reward``.

    With ``opponents`` or a ``pool``, the front answers further keys with models that are not trained. Their calls are rows with the name of the
    model as ``agent`` and ``trainable`` False. Such a row's reward is what was posted with its key, or else minus the reward of the run.

    Args:
        tokenizer: the policy's tokenizer, or its path.
        gconfig: defaults of the generation arguments.
        model_name: name of the policy in requests; ``default`` and ``policy`` are accepted too.
        front: an ``OpenAIFront`` to share. None creates one that ends with the workflow.
        overflow_reward: reward of a run whose conversation exceeded the context and that has no other reward.
        opponents: models that are not trained, by name: the directory of each, also of a LoRA adapter. Each has a key of its own.
        pool: arguments of ``Pool``: an earlier version of this run has the key ``opponent``. If the policy is to play itself, the policy
            answers this key.
    """

    #: Further arguments of ``OpenAIFront.episode``.
    episode_settings: Mapping[str, Any] = {}

    def __init__(
        self,
        tokenizer: Any,
        gconfig: GenerationHyperparameters | None = None,
        model_name: str = "default",
        front: OpenAIFront | None = None,
        overflow_reward: float = 0.0,
        opponents: Mapping[str, str] | None = None,
        pool: Mapping[str, Any] | None = None,
    ) -> None:
        self.front = front or OpenAIFront(load_tokenizer(tokenizer), model_name)
        self.opponents = Opponents(self.front.tokenizer, opponents, pool)
        self.draws = self.opponents if pool else None
        self.gconfig = gconfig
        self.overflow_reward = overflow_reward

    @abstractmethod
    async def run_agent(self, episode: OpenAIEpisode, data: dict[str, Any]) -> Any:
        """Run the agent once.

        Returns:
            A number, which is the reward of the run; ``{call id: number}`` for single calls; or None if the agent sent its rewards
            to the front.
        """

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Experience]:
        """Run the agent once; return one experience for each sequence of calls that extend one another."""
        settings = {"gconfig": self.gconfig, **self.episode_settings}
        with contextlib.ExitStack() as opened:
            episode = opened.enter_context(await asyncio.to_thread(self.front.episode, engine, **settings))
            agents = self.opponents.players(engine, data)
            for key, (_, model) in agents.items():
                episode.opponents[key] = opened.enter_context(self.front.episode(model, **settings))
            try:
                reward = await self.run_agent(episode, data)
            except Exception as error:
                if not episode.recorder.outgrew_context or isinstance(error, RewardError | SandboxError | LostToolError):
                    raise
                logger.warning("an agent's conversation outgrew the context, and it ended with %s", type(error).__name__)
                reward = None
            if reward is None and episode.run_reward is None and episode.recorder.outgrew_context:
                reward = self.overflow_reward
            if isinstance(reward, Mapping):
                for call, value in reward.items():
                    episode.set_reward(value, call=call)
            elif reward is not None:
                episode.set_reward(reward)
        experiences = _experiences(episode)
        if not agents:
            return experiences
        for experience in experiences:
            experience.agent = POLICY
        for key, (name, _) in agents.items():
            experiences += _of_opponent(episode, episode.opponents[key], name)
        return experiences


def _of_opponent(episode: OpenAIEpisode, opponent: OpenAIEpisode, name: str) -> list[Experience]:
    """Convert the calls of an opponent in a run to experiences that are not trained."""
    assert episode.run_reward is not None
    experiences = opponent.experiences(-episode.run_reward if opponent.run_reward is None else None)
    for experience in experiences:
        experience.agent, experience.trainable = name, False
    return experiences


def _experiences(episode: OpenAIEpisode) -> list[Experience]:
    """Convert a run that ended to experiences, and report its metrics.

    Raises:
        PromptTooLongError: the first prompt did not fit into the context.
        WorkflowError: the agent made no call, or has no reward.
    """
    experiences = episode.experiences()
    if not experiences:
        if episode.recorder.outgrew_context:
            raise PromptTooLongError(
                "the agent's first prompt leaves no room in the context: shorten it, or raise the context."
            )
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
        agent_sub_agents=episode.sub_agents,
        agent_side_calls=episode.side_calls,
        agent_retries=episode.retries.count,
        malformed_tool_calls=episode.malformed_tool_calls,
        agent_outgrew_context=float(episode.recorder.outgrew_context),
        agent_reward=episode.run_reward + sum(episode.call_rewards().values()),
    )
    return experiences


@WORKFLOWS.register_module("openai_agent")
class OpenAIAgentWorkflow(FrontWorkflow):
    """Runs ``agent(data, base_url=…, api_key=…)`` and trains on its calls to the policy. With opponents, the agent also gets their keys:
    ``opponents={name: api_key}``.

    The agent uses any OpenAI client or framework, in this process or in one that it starts. It returns its reward: a number for
    the run; ``{call id: number}`` for single calls, identified by the ids of their responses; or None if it sent its rewards with
    ``POST {base_url}/rewards``.

    Args:
        agent: a function, plain or async, or its import path; or a class or object with a method ``run``. Plain functions run
            in threads.
        agent_kwargs: passed to a class's constructor, or else to every call.

    The other arguments are those of ``FrontWorkflow``, which also describes conversations that exceed the context.
    """

    def __init__(
        self,
        agent: Any,
        tokenizer: Any,
        gconfig: GenerationHyperparameters | None = None,
        agent_kwargs: dict[str, Any] | None = None,
        model_name: str = "default",
        front: OpenAIFront | None = None,
        overflow_reward: float = 0.0,
        opponents: Mapping[str, str] | None = None,
        pool: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(agent, str):
            agent = resolve_function(agent, "agent")
        self.agent_kwargs = agent_kwargs or {}
        if inspect.isclass(agent):
            agent, self.agent_kwargs = agent(**self.agent_kwargs), {}
        self.agent = getattr(agent, "run", agent)
        if not callable(self.agent):
            raise WorkflowError(f"the agent is {agent!r}; give a function, or a class or object with a method run(data, …).")
        super().__init__(tokenizer, gconfig, model_name, front, overflow_reward, opponents, pool)
        self.threads = AbandonableThreads(limit=16)

    async def run_agent(self, episode: OpenAIEpisode, data: dict[str, Any]) -> Any:
        """Call the agent."""
        arguments = {"base_url": episode.base_url, "api_key": episode.api_key, **self.agent_kwargs}
        if episode.opponents:
            arguments["opponents"] = {name: opponent.api_key for name, opponent in episode.opponents.items()}
        if inspect.iscoroutinefunction(self.agent):
            return await self.agent(data, **arguments)
        return await self.threads.run(lambda: self.agent(data, **arguments), name="an agent")
