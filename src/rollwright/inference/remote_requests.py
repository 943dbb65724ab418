"""Requests for tokens to servers, the same for every backend.

Invariants:

* a token's version is the one that the server reports; if a server cannot report it, an update in flight is an error, not a guess;
* a request is sent again only if its connection failed, or its server was given up, before a response began.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from rollwright.errors import EngineError, RequestAborted
from rollwright.inference.backends.server_backend import ServerBackend
from rollwright.inference.connections import ConnectionLostError, ServerRefusedError, refusal_of
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.router import Server
from rollwright.inference.server_set import ServerSet
from rollwright.inference.weights.server_weights import ServerWeights
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteEngine")

#: HTTP statuses that mean a busy or restarting server rather than an invalid request.
_TRY_AGAIN_STATUSES = {429, 502, 503, 504}
#: vLLM's value for a log-probability of minus infinity.
_NO_LOGPROB = -9999.0
#: Completes "it could not …" in the log.
_PROBE = "answer the audit's probe"
_STOP_REASONS = ("stop", "length", "abort")


class RemoteRequests:
    """Sends requests to a set of servers, reads their answers and aborts requests.

    Args:
        backend: the servers' protocol.
        servers: the servers.
        weights: tells which version the servers hold, and whether new requests have to wait.
    """

    def __init__(self, backend: ServerBackend, servers: ServerSet, weights: ServerWeights) -> None:
        self.backend = backend
        self.servers = servers
        self.weights = weights
        self.config = servers.config

    async def generate(self, request: ModelRequest) -> ModelResponse:
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
            router = self.servers.router
            try:
                response = await self._ask(server, request)
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
        response.latency = time.perf_counter() - started
        response.logprobs_shifted, response.server = shifted, server.address
        return response

    async def _ask(self, server: Server, request: ModelRequest) -> ModelResponse:
        """Send a request to one server with the current adapter, if there is one, and read the answer."""
        with self.weights.adapters.bound(request) as (bound, adapter_version):
            version_when_sent = self.weights.version
            async with self.servers.router.send(request.rid, server) as wire_id:
                payload = self.backend.payload(bound, wire_id, server)
                data = await self.servers.connections.post(server.url + self.backend.generate_path, payload)
        return self.read_answer(request, data, version_when_sent, adapter_version)

    def read_answer(
        self, request: ModelRequest, data: dict[str, Any], version_when_sent: int, adapter_version: int | None = None
    ) -> ModelResponse:
        """Read and check a server's answer.

        Args:
            request: the request.
            data: the answer.
            version_when_sent: version of the servers' weights when the request was sent.
            adapter_version: version of the adapter that the request named for this engine, which is that of its tokens.

        Raises:
            EngineError: the answer contradicts itself, or is not in the protocol's form.
        """
        kind = self.backend.kind
        try:
            adapters = self.weights.adapters
            of_base = version_when_sent if adapter_version is None else adapters.base_label
            response = self.backend.response(request, data, of_base)
            if adapter_version is not None:
                response.output_versions = adapters.versions(response.output_versions, adapter_version)
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
        if self.config.routing_replay and response.output_tokens and response.routed_experts is None:
            raise EngineError(
                f"rollout.routing_replay: an answer of the {kind} server has no routed_experts: {self.backend.records_experts_if}."
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
            with self.weights.adapters.bound(request) as (bound, adapter_version):
                payload = self.backend.payload(bound, self.servers.router.new_wire_id("audit-probe"), server)
                limit = self.config.request_timeout
                data = self.servers.ask(server, "POST", self.backend.generate_path, payload, timeout=limit)
            return self.read_answer(request, data, self.weights.version, adapter_version)

        proofs = self.weights.proofs
        answers = (
            self.servers.each_of(proofs.updated, ask, _PROBE)
            if proofs.is_running
            else self.servers.each_in_service(ask, _PROBE)
        )
        if proofs.is_running:
            proofs.updated = list(answers)
        elif not answers:
            logger.warning(
                "No server is in service that could be compared with the trainer after version %d.", self.weights.version
            )
        return {self.name_of(server): answer for server, answer in answers.items()}

    def name_of(self, server: Server) -> str:
        """Return a server's name in the messages of the audit and the canary."""
        return f"The {self.backend.kind} server at {server.address}"

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
