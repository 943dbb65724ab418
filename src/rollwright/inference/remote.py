"""An inference engine behind HTTP servers: it sends the requests, and has parts for the servers, their weights and their protocol.

Invariants:

* a token's version is the one that the server reports; if a server cannot report it, an update in flight is an error, not a guess;
* a request is sent again only if its connection failed, or its server was given up, before a response began.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, EngineError, RequestAborted
from rollwright.inference.backends.server_backend import ServerBackend
from rollwright.inference.connections import ConnectionLostError, ServerRefusedError, refusal_of
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.network import parse_addresses
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.router import Server
from rollwright.inference.server_set import ServerSet
from rollwright.inference.weights.publication import WeightPublication
from rollwright.inference.weights.server_weights import ServerWeights
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteEngine")

#: The engines of this process that are connected to servers, oldest first. A trainer that was given no engine publishes to these.
CONNECTED_ENGINES: list[RemoteInferenceEngine] = []
#: Arguments of ``initialize`` in ported programs that say nothing about servers.
_IGNORED_ARGUMENTS = {"engine_id", "train_data_parallel_size", "ft_spec"}
#: HTTP statuses that mean a busy or restarting server rather than an invalid request.
_TRY_AGAIN_STATUSES = {429, 502, 503, 504}
#: vLLM's value for a log-probability of minus infinity.
_NO_LOGPROB = -9999.0
_STOP_REASONS = ("stop", "length", "abort")


class RemoteInferenceEngine(InferenceEngine):
    """Inference engine that samples on HTTP servers of one backend.

    Attributes:
        config: the ``rollout`` section.
        servers: finds, watches and calls the servers.
        backend: the servers' protocol.
        weights: the version that the servers hold; pauses servers, restores their weights, and follows another publisher.
        publication: transfers new weights.
    """

    def __init__(
        self,
        backend: type[ServerBackend],
        config: RolloutConfig | None = None,
        *,
        addresses: Iterable[str] | None = None,
        servers_are_replaced: bool = False,
        only_asks: bool = False,
    ) -> None:
        """Args:
        backend: kind of the servers.
        config: addresses, key, time limits, and what happens to running requests on a weight update.
        addresses: addresses of the servers. None reads them from the config, then from the environment.
        servers_are_replaced: see ``ServerWeights``.
        only_asks: see ``ServerWeights``.
        """
        self.config = config or RolloutConfig()
        self.servers = ServerSet(self.config, backend.kind, addresses)
        self.backend = backend(self.config, self.servers)
        self.weights = ServerWeights(self.backend, self.servers, servers_are_replaced=servers_are_replaced, only_asks=only_asks)
        self.publication = WeightPublication(self.backend, self.servers, self.weights)

    @property
    def kind(self) -> str:
        """Name of the servers in messages."""
        return self.backend.kind

    @property
    def addresses(self) -> list[str]:
        """Addresses of all servers, in service or not."""
        return [server.address for server in self.servers.router.servers]

    # -- from start to end ---------------------------------------------------------------------------------------------

    def initialize(
        self,
        *args: Any,
        addresses: str | Iterable[str] | None = None,
        addr: str | Iterable[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Find the servers, wait until each is healthy, and read the version of their weights. Idempotent.

        Args:
            args: ignored.
            addresses: servers, as a list or a comma-separated string. None uses those given on construction, in the config or in
                the environment.
            addr: another name of ``addresses``.
            kwargs: arguments about the trainer in ported programs (``engine_id``, ``train_data_parallel_size``, ``ft_spec``); ignored.

        Raises:
            ConfigError: an argument is unknown, or an address is malformed.
            EngineError: no server is known, one has ended, or one is not healthy within ``setup_timeout``.
        """
        if unknown := sorted(set(kwargs) - _IGNORED_ARGUMENTS):
            raise ConfigError(f"initialize() has no argument {unknown[0]!r}; give addresses, or set rollout.addresses.")
        if addresses is not None and addr is not None:
            raise ConfigError("initialize() was given two lists of servers: give one of addresses and addr.")
        if self.servers.is_open:
            return
        named = addr if addresses is None else addresses
        router = self.servers.open(parse_addresses(named) if isinstance(named, str) else named)
        try:
            self.weights.connect()
        except BaseException:
            self.destroy()
            raise
        self.servers.watch(self.weights.bring_back, lambda: self.weights.is_paused)
        CONNECTED_ENGINES.append(self)
        logger.info("%s servers in use: %s", self.kind, ", ".join(server.address for server in router.servers))

    def destroy(self) -> None:
        """Stop watching the servers, close every connection and remove what was shared with the servers.

        Servers keep running unless they were started for this engine (``own``).
        """
        if self in CONNECTED_ENGINES:
            CONNECTED_ENGINES.remove(self)
        self.servers.close()
        self.publication.close()

    def own(self, launched: Any) -> None:
        """Take ownership of servers that were started for this engine: close them when the engine is destroyed.

        Args:
            launched: an object with ``close()``; ``check(address=None)``, which raises if that server (for None: every server) has ended;
                and ``weights_root``, a directory that is shared with the servers.
        """
        self.servers.launched.append(launched)

    def use_servers(self, addresses: Iterable[str]) -> None:
        """See ``Router.replace``."""
        self.servers.router.replace(addresses)

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def is_batch_invariant(self) -> bool:  # type: ignore[override]
        """True if no server's answer to a request depends on what else it computes."""
        return self.backend.is_batch_invariant

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample one completion; see ``InferenceEngine.agenerate``.

        If the connection fails before a response began, the request is sent again, to another server if this one is gone. If the
        server is too busy, the request is sent again for at most ``setup_timeout``.

        Raises:
            PromptTooLongError: the server has no room for the prompt and a new token.
            RequestAborted: the engine was closed.
            EngineError: a parameter cannot be honoured, the server rejected the request, or no server is left.
        """
        kind, retries = self.backend.kind, self.config.request_retries
        shifted = self.backend.check(request, f"the {kind} server at {self._addresses()}")
        started, lost, busy = time.perf_counter(), 0, 0
        while True:
            server = await self._lease(request.rid)
            router, version_when_sent = self.servers.router, self.weights.version
            try:
                async with router.send(request.rid, server) as wire_id:
                    payload = self.backend.payload(request, wire_id, server)
                    data = await self.servers.connections.post(server.url + self.backend.generate_path, payload)
                break
            except ConnectionLostError as error:
                lost += 1
                logger.debug("%s Trying again (%d of %d).", error, lost, retries)
                await asyncio.to_thread(self.servers.suspect, server, str(error))
                if lost > retries:
                    raise EngineError(
                        f"A request of conversation {request.rid!r} failed {lost} times (rollout.request_retries); servers: "
                        f"{router.describe()}. Last: {error}"
                    ) from error
            except ServerRefusedError as error:
                if error.status not in _TRY_AGAIN_STATUSES:
                    raise refusal_of(error) from error
                busy += 1
                if time.perf_counter() - started > self.config.setup_timeout:
                    raise EngineError(
                        f"The {kind} servers have been too busy for {self.config.setup_timeout:g} s: lower "
                        f"rollout.max_concurrent_samples, or use more servers. Last: {error}"
                    ) from error
                await asyncio.sleep(min(0.1 * 2 ** min(busy, 5), 2.0))
            finally:
                router.give_back(server)
        response = self.read_answer(request, data, version_when_sent)
        response.latency = time.perf_counter() - started
        response.logprobs_shifted, response.server = shifted, server.address
        return response

    def read_answer(self, request: ModelRequest, data: dict[str, Any], version_when_sent: int) -> ModelResponse:
        """Read and check a server's answer.

        Raises:
            EngineError: the answer contradicts itself, or is not in the protocol's form.
        """
        kind = self.backend.kind
        try:
            response = self.backend.response(request, data, version_when_sent)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"An answer is not in the form of {kind}'s {self.backend.generate_path} ({type(error).__name__}: {error}): "
                f"{str(data)[:200]!r}. See that the addresses are those of {kind} servers: {self._addresses()}."
            ) from error
        if len(response.output_logprobs) != len(response.output_tokens):
            raise EngineError(
                f"The {kind} server returned {len(response.output_tokens)} tokens and {len(response.output_logprobs)} "
                "log-probabilities; a request needs both from one sampling."
            )
        if any(not math.isfinite(value) or value <= _NO_LOGPROB for value in response.output_logprobs):
            raise EngineError(
                f"The {kind} server returned log-probabilities that are not finite: {response.output_logprobs[:8]}."
            )
        response.rid, response.temperature = request.rid, request.gconfig.effective_temperature
        if response.stop_reason not in _STOP_REASONS:
            raise EngineError(
                f"The {kind} server ended a request with finish_reason {response.stop_reason!r}; those that its tokens can be "
                f"used with are {', '.join(_STOP_REASONS)}. See the server's log."
            )
        return response

    def probe(self, request: ModelRequest) -> dict[str, ModelResponse] | None:
        """Sample one request on every server in service; see ``WeightReceiver.probe``."""
        if self.weights.is_paused:
            return None

        def ask(server: Server) -> ModelResponse:
            payload = self.backend.payload(request, self.servers.router.new_wire_id("audit-probe"), server)
            limit = self.config.request_timeout
            data = self.servers.ask(server, "POST", self.backend.generate_path, payload, timeout=limit)
            return self.read_answer(request, data, self.weights.version)

        answers = self.servers.each_in_service(ask, "answer the audit's probe")
        if not answers:
            logger.warning(
                "No server is in service that could be compared with the trainer after version %d.", self.weights.version
            )
        return {f"The {self.backend.kind} server at {server.address}": answer for server, answer in answers.items()}

    def _addresses(self) -> str:
        return ", ".join(server.address for server in self.servers.router.servers)

    async def _lease(self, conversation: str) -> Server:
        deadline = time.monotonic() + self.config.setup_timeout
        while True:
            if not self.servers.is_open:
                raise RequestAborted(
                    f"The client of the {self.backend.kind} servers was closed or never connected; call initialize() first."
                )
            router = self.servers.router
            if not self.weights.is_holding:
                server = router.choose(conversation)
                if server is not None:
                    return server
                self.servers.raise_if_all_ended()
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"No {self.backend.kind} server has been in service for {self.config.setup_timeout:g} s: {router.describe()}."
                    )
            await asyncio.sleep(0.05)

    def abort(self, rid: str | None = None) -> None:
        """End the requests of one conversation, or all requests of this engine; they return the tokens sampled so far.

        On an event loop this does not wait for the servers, because the loop's other tasks would wait, too.
        """
        sent = self.servers.router.by_server(rid) if self.servers.is_open else []
        asked = [self.servers.submit(self._abort_quietly, *entry) for entry in sent]
        if asyncio._get_running_loop() is None:
            for future in asked:
                future.result()

    def _abort_quietly(self, server: Server, wire_ids: list[str]) -> None:
        try:
            self.backend.abort_on_server(server, wire_ids)
        except EngineError as error:  # the server's requests end with their connections, or when it is taken out
            logger.warning("The server at %s was asked to abort %d requests: %s", server.address, len(wire_ids), error)

    # -- weights -------------------------------------------------------------------------------------------------------

    def get_version(self) -> int:
        """Return the version of the weights that the next token is sampled with."""
        return self.weights.version

    def set_version(self, version: int) -> None:
        """See ``ServerWeights.set_version``."""
        self.weights.set_version(version)

    def pause(self) -> None:
        """See ``ServerWeights.pause``."""
        self.weights.pause()

    def resume(self) -> None:
        """See ``ServerWeights.resume``."""
        self.weights.resume()

    def when_resumed(self, action: Callable[[], object]) -> None:
        """See ``ServerWeights.when_resumed``."""
        self.weights.when_resumed(action)

    def receive_weights(self, weights: WeightStream, version: int, meta: WeightUpdateMeta | None, config: Any) -> None:
        """See ``WeightPublication.update``."""
        self.publication.update(meta, version, weights, config)

    @property
    def weight_transport(self) -> str:
        """See ``WeightPublication.default_meta``."""
        return self.publication.default_meta().type

    @property
    def lacks_weights(self) -> bool:
        """See ``ServerWeights.are_lacking``."""
        return self.weights.are_lacking

    @property
    def weight_holders(self) -> list[str]:
        """Addresses of the servers in service."""
        return [server.address for server in self.servers.router.in_service()]

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """``rollout.weight_dtype``, or for ``auto`` the type that the servers in service report (None if they differ)."""
        if self.config.weight_dtype != "auto":
            return getattr(torch, self.config.weight_dtype)
        held = {self.backend.held_dtype(server) for server in self.servers.router.in_service()}
        return held.pop() if len(held) == 1 else None

    @property
    def logprob_tolerance(self) -> float | None:
        """``rollout.logprob_tolerance``."""
        return self.config.logprob_tolerance
