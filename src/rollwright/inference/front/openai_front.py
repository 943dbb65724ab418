"""The OpenAI front: an HTTP server in front of any inference engine that records agents of any framework.

Each agent gets a ``base_url`` and an API key, and needs no change and no library of ours. Requests with its key are answered by the engine
of its run and recorded token for token. Unknown keys, and keys of runs that have ended, are rejected with 401.

The routes: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``, ``/v1/responses`` and ``/v1/messages``
(tools, streams), and ``POST /v1/rewards`` for agents that score themselves. ``workflows.openai_agent`` makes a workflow of an agent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import ConfigError
from rollwright.experience.journal.writing import EpisodeWriter
from rollwright.inference.engine import InferenceEngine
from rollwright.tracking.logging import getLogger

try:
    from fastapi import FastAPI, Request

    from rollwright.inference.front.openai_episode import OpenAIEpisode, Reward
    from rollwright.inference.front.side_conversations import SideConversation
    from rollwright.inference.server.exchange import RequestError, Routes, error_response, given_key
    from rollwright.inference.server.images import ImageReader
    from rollwright.inference.server.openai import ROUTES
    from rollwright.inference.server.service import ServerThread, make_service
    from rollwright.inference.server.settings import ServiceSettings
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
        self._server: tuple[ServerThread, Path] | None = None
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
        side_conversations: Sequence[SideConversation] = (),
        resamples_equal: bool = True,
    ) -> OpenAIEpisode:
        """Open a run that has its own key; ``engine`` answers its calls. May be called from any thread.

        Args:
            engine: usually the engine that a workflow gets, which is bound to its sample.
            gconfig: defaults of the generation arguments.
            template_kwargs: passed to the chat template.
            context_length: maximum tokens of a prompt and its answer. None uses the engine's limit.
            journal: records the run's calls if the engine does not, so that ``OpenAIEpisode.restore`` can continue it.
            api_key: key of a run that continues. None makes a new one.
            side_conversations: recognise conversations beside the main one: those that are not trained, such as for titles, and sub-agents.
            resamples_equal: sample an answered request anew if a client sends it again without marking it as a retry. False answers
                it again with the same answer, for programs that retry by themselves.

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
            side_conversations=side_conversations,
            resamples_equal=resamples_equal,
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
        return self._started()[0].url

    @property
    def socket(self) -> Path:
        """Path of a Unix socket of the server, which is started if it does not run. Boxes are given it instead of the network.

        Raises:
            ConfigError: the port or the socket cannot be bound.
        """
        return self._started()[1]

    def _started(self) -> tuple[ServerThread, Path]:
        with self._lock:
            if self._server is None:
                settings = dataclasses.replace(self._settings)  # the copy receives the port
                directory = tempfile.TemporaryDirectory(prefix="rollwright-front-")
                path = Path(directory.name, "front.sock")
                server = ServerThread(_application(self, settings), settings, path)

                def stop() -> None:
                    server.stop()
                    directory.cleanup()

                self._server = server, path
                self._stop_server = weakref.finalize(self, stop)
                logger.info("the OpenAI front listens at %s", server.url)
            return self._server

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
