"""The OpenAI front: an HTTP server in front of any inference engine that records agents of any framework.

Each agent gets a ``base_url`` and an API key, and needs no change and no library of ours. Requests with its key are answered by the engine
of its run and recorded token for token. Unknown keys, and keys of runs that have ended, are rejected with 401.

The routes: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``, ``/v1/responses`` and ``/v1/messages``
(tools, streams), and ``POST /v1/rewards`` for agents that score themselves. ``OpenAIAgentWorkflow`` makes a workflow of an agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import secrets
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import ConfigError, PromptTooLongError, WorkflowError
from rollwright.experience.experience import Experience
from rollwright.experience.journal.writing import EpisodeWriter
from rollwright.inference.engine import InferenceEngine
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.base import RolloutWorkflow
from rollwright.workflows.registry import resolve_function
from rollwright.workflows.task_runner import AbandonableThreads

try:
    from fastapi import FastAPI, Request

    from rollwright.inference.server.exchange import RequestError, Routes, error_response, given_key
    from rollwright.inference.server.images import ImageReader
    from rollwright.inference.server.openai import ROUTES
    from rollwright.inference.server.service import ServerThread, make_service
    from rollwright.inference.server.settings import ServiceSettings
    from rollwright.rollout.front.openai_episode import OpenAIEpisode, Reward
except ModuleNotFoundError as error:
    raise ConfigError(
        f"the OpenAI front needs the package {error.name}, which is not installed: pip install 'rollwright[openai]'."
    ) from error

logger = getLogger("OpenAIFront")


class OpenAIFront:
    """Serves the OpenAI protocol for any number of runs at once.

    ::

        with OpenAIFront(tokenizer, "my-model") as front, front.episode(engine) as episode:
            await agent(base_url=episode.base_url, api_key=episode.api_key)
            return episode.experiences(reward=1.0)

    The server runs in a thread of this process. It starts with the first episode and ends on ``close``, when the object is collected, or
    when the process exits.
    """

    def __init__(
        self,
        tokenizer: Any,
        model_name: str = "default",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        processor: Any = None,
        image_hosts: Iterable[str] = (),
        **limits: Any,
    ) -> None:
        """Args:
        tokenizer: the policy's tokenizer, with its chat template.
        model_name: name of the policy in requests.
        host: interface to bind. If other machines can reach it, agents can run there, and only their keys protect the server.
        port: port to listen on; 0 selects a free one.
        processor: the model's image processor or its directory. None uses the one in the tokenizer's directory, if any.
        image_hosts: hosts that images may be fetched from; other images have to be ``data:`` URLs.
        limits: ``allowed_hosts``, ``max_body_bytes`` and ``receive_seconds`` of ``ServiceSettings``.
        """
        self.tokenizer = tokenizer
        self.model_name = model_name or "default"
        self._settings = ServiceSettings(host, port, **limits)
        self._images = ImageReader(self.tokenizer, processor, image_hosts)
        self._episodes: dict[str, OpenAIEpisode] = {}
        self._lock = threading.Lock()
        self._holds_calls = False
        self._server: ServerThread | None = None
        self._stop_server: Callable[[], Any] = lambda: None

    # -- runs ----------------------------------------------------------------------------------------------------------

    def episode(
        self,
        engine: InferenceEngine,
        *,
        gconfig: GenerationHyperparameters | None = None,
        template_kwargs: dict[str, Any] | None = None,
        context_length: int | None = None,
        journal: EpisodeWriter | None = None,
        api_key: str | None = None,
    ) -> OpenAIEpisode:
        """Open a run that has its own key; ``engine`` answers its calls. May be called from any thread.

        Args:
            engine: usually the engine that a workflow gets, which is bound to its sample.
            gconfig: defaults of the generation arguments.
            template_kwargs: passed to the chat template.
            context_length: maximum tokens of a prompt and its answer. None uses the engine's limit.
            journal: records the run's calls if the engine does not, so that ``OpenAIEpisode.restore`` can continue it.
            api_key: key of a run that continues. None makes a new one.

        Returns:
            The run; it unpacks into ``base_url, api_key``.
        """
        base_url = f"{self.url}/v1"
        episode = OpenAIEpisode(
            engine,
            self.tokenizer,
            self.model_name,
            base_url,
            api_key or f"rollwright-{secrets.token_urlsafe(24)}",
            gconfig=gconfig,
            template_kwargs=template_kwargs,
            context_length=context_length,
            images=self._images,
            journal=journal,
        )
        with self._lock:
            for key in [key for key, other in self._episodes.items() if not other.is_open]:
                del self._episodes[key]
            self._episodes[episode.api_key] = episode
        return episode

    @contextlib.contextmanager
    def holding_calls(self) -> Iterator[None]:
        """Answer calls with 503 (retry) instead of 401 inside the context, while runs are being restored."""
        self._holds_calls = True
        try:
            yield
        finally:
            self._holds_calls = False

    # -- the server ----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """``http://host:port`` of the server, which is started if it does not run.

        Raises:
            ConfigError: the port cannot be bound.
        """
        with self._lock:
            if self._server is None:
                settings = dataclasses.replace(self._settings)  # the copy receives the port
                self._server = ServerThread(_application(self, settings), settings)
                self._stop_server = weakref.finalize(self, self._server.stop)
                logger.info("the OpenAI front listens at %s", self._server.url)
            return self._server.url

    def close(self) -> None:
        """End the server and every run. Idempotent."""
        with self._lock:
            self._server = None
            self._episodes.clear()
        self._stop_server()

    def __enter__(self) -> OpenAIFront:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def episode_of(self, api_key: str | None) -> OpenAIEpisode:
        """Return the run that an API key identifies.

        Raises:
            RequestError: the key is unknown or its run has ended (401), or runs are being restored (503).
        """
        if self._holds_calls:
            raise RequestError("The runs of this front are being restored: ask again.", status=503)
        episode = self._episodes.get(api_key or "")
        if episode is None or not episode.is_open:
            said = (
                "The request has no API key" if api_key is None else "No run has this API key (it is unknown, or its run ended)"
            )
            raise RequestError(
                f"{said}: use the base_url and api_key that the episode was opened with.",
                status=401,
                kind="authentication_error",
            )
        return episode


def _application(front: OpenAIFront, settings: ServiceSettings) -> FastAPI:
    """Make the server's application. Its routes hold the front weakly, so that the server ends when the front is collected."""
    held = weakref.ref(front)

    def route(serve: Callable[[Any, Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        async def answer(request: Request) -> Any:
            try:
                front = held()
                if front is None:
                    raise RequestError("The OpenAI front has ended.", status=401, kind="authentication_error")
                episode = front.episode_of(given_key(request.headers))
            except RequestError as refusal:  # reported in the front's form, whatever the dialect
                return error_response(refusal)
            return await serve(episode, request)

        return answer

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    of_episodes = (*ROUTES, ("POST", "/v1/rewards", OpenAIEpisode.take_reward, Reward))
    table = [(method, path, route(serve), body) for method, path, serve, body in of_episodes]
    return make_service("rollwright OpenAI front", [Routes([*table, ("GET", "/health", health, None)])], settings)


# -- any agent as a workflow -------------------------------------------------------------------------------------------


class OpenAIAgentWorkflow(RolloutWorkflow):
    """Runs ``agent(data, base_url=…, api_key=…)`` and trains on its calls to the policy.

    The agent uses any OpenAI client or framework, in this process or in one that it starts. It returns its reward: a number for
    the run; ``{call id: number}`` for single calls, identified by the ids of their responses; or None if it sent its rewards with
    ``POST {base_url}/rewards``.

    If the conversation exceeds the context, the client gets status 400 with ``code: context_length_exceeded``. Earlier calls are
    kept and marked as truncated; if the agent then raises or returns no reward, the reward is ``overflow_reward``.

    Args:
        agent: a function, plain or async, or its import path; or a class or object with a method ``run``. Plain functions run
            in threads.
        tokenizer: the policy's tokenizer, or its path.
        gconfig: defaults of the generation arguments.
        agent_kwargs: passed to a class's constructor, or else to every call.
        model_name: name of the policy in requests; ``default`` and ``policy`` are accepted too.
        front: an ``OpenAIFront`` to share. None creates one that ends with the workflow.
        overflow_reward: reward of a run whose conversation exceeded the context and that has no other reward.
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
    ) -> None:
        if isinstance(agent, str):
            agent = resolve_function(agent, "agent")
        self.agent_kwargs = agent_kwargs or {}
        if inspect.isclass(agent):
            agent, self.agent_kwargs = agent(**self.agent_kwargs), {}
        self.agent = getattr(agent, "run", agent)
        if not callable(self.agent):
            raise WorkflowError(f"the agent is {agent!r}; give a function, or a class or object with a method run(data, …).")
        self.front = front or OpenAIFront(load_tokenizer(tokenizer), model_name)
        self.gconfig = gconfig
        self.overflow_reward = overflow_reward
        self.threads = AbandonableThreads(limit=16)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Experience]:
        """Run the agent once; return one experience for each sequence of calls that extend one another."""
        with await asyncio.to_thread(self.front.episode, engine, gconfig=self.gconfig) as episode:
            try:
                reward = await self._run(episode, data)
            except Exception as error:
                if not episode.recorder.outgrew_context:
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
            malformed_tool_calls=episode.malformed_tool_calls,
            agent_outgrew_context=float(episode.recorder.outgrew_context),
            agent_reward=episode.run_reward + sum(episode.call_rewards().values()),
        )
        return experiences

    async def _run(self, episode: OpenAIEpisode, data: dict[str, Any]) -> Any:
        arguments = {"base_url": episode.base_url, "api_key": episode.api_key, **self.agent_kwargs}
        if inspect.iscoroutinefunction(self.agent):
            return await self.agent(data, **arguments)
        return await self.threads.run(lambda: self.agent(data, **arguments), name="an agent")
