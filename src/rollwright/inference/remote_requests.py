"""Servers are asked for tokens, the same for every protocol.

Invariants:

* a token's version is the one that the server says; where a server cannot say it, an update in flight is an error, not a
  guess;
* a request is sent again only where its connection failed, or its server was given up, before a response began.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.errors import EngineError, RequestAborted
from rollwright.inference.connections import ConnectionLostError, ServerRefusedError, refusal_of
from rollwright.inference.parameters import ParameterTable
from rollwright.inference.remote import RemoteServers
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.router import Server
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteEngine")

#: Statuses of a server that is busy or restarting, not of a wrong request.
_TRY_AGAIN_STATUSES = {429, 502, 503, 504}
#: What vLLM writes for a log-probability of minus infinity.
_NO_LOGPROB = -9999.0
_STOP_REASONS = ("stop", "length", "abort")


class RemoteRequests(RemoteServers):
    """A client that asks its servers for tokens.

    Attributes:
        generate_path: where tokens are asked for.
        parameters: how generation parameters travel.
        refused_inputs: parts of a request that these servers have no place for, and what to do then.
    """

    generate_path = "/generate"
    parameters = ParameterTable({})
    refused_inputs: Mapping[str, str] = {
        "position_ids": "use the built-in engine or rollwright serve-model",
        "branch_ids": "use the built-in engine or rollwright serve-model",
        "multi_modal": "use the built-in engine in this process",
        "image_data": "use the built-in engine or an SGLang server",
        "top_logprobs": "use the built-in engine, SGLang or vLLM",
        "prompt_logprobs_from": "use the built-in engine, SGLang or vLLM",
    }

    @abstractmethod
    def payload(self, request: ModelRequest, wire_id: str, server: Server) -> dict[str, Any]:
        """The body of one generation request; ``wire_id`` names it for ``abort_on_server``."""

    @abstractmethod
    def response(self, request: ModelRequest, data: dict[str, Any], version_when_sent: int) -> ModelResponse:
        """What the server's answer says, with the version that sampled each token."""

    def abort_on_server(self, server: Server, wire_ids: list[str]) -> None:
        """End requests, which return what they have; by default they run to their end."""

    def check(self, request: ModelRequest, where: str) -> bool:
        """Refuse what these servers cannot do; True where the log-probabilities will not be the contract's."""
        for name, remedy in self.refused_inputs.items():
            if getattr(request, name) is not None:
                raise EngineError(f"{name} cannot travel to {where}; {remedy}.")
        return self.parameters.check(request.gconfig, where, accept_shifted=self.config.accept_shifted_logprobs)

    def __init__(self, config: RolloutConfig | None = None, *, addresses: Iterable[str] | None = None) -> None:
        super().__init__(config, addresses=addresses)
        self._version = 0
        self._holding = False  # new requests wait on this side

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample one completion; see ``InferenceEngine.agenerate``.

        A connection that fails before a response began is tried again, on another server where this one is gone. A server
        that is too busy is asked again, for at most ``setup_timeout``.

        Raises:
            PromptTooLongError: the server has no room for the prompt and a new token.
            RequestAborted: the client was closed.
            EngineError: a parameter cannot be honoured, the server refused, or no server is left.
        """
        shifted = self.check(request, f"the {self.kind} server at {', '.join(self.addresses)}")
        started, lost, busy = time.perf_counter(), 0, 0
        while True:
            server = await self._lease(request.rid)
            version_when_sent = self._version
            try:
                async with self.router.send(request.rid, server) as wire_id:
                    payload = self.payload(request, wire_id, server)
                    data = await self.connections.post(server.url + self.generate_path, payload)
                break
            except ConnectionLostError as error:
                lost += 1
                logger.debug("%s Trying again (%d of %d).", error, lost, self.config.request_retries)
                if self._monitor is not None:
                    await asyncio.to_thread(self._monitor.suspect, server, str(error))
                if lost > self.config.request_retries:
                    raise EngineError(
                        f"A request of conversation {request.rid!r} failed {lost} times (rollout.request_retries); servers: "
                        f"{self.router.describe()}. Last: {error}"
                    ) from error
            except ServerRefusedError as error:
                if error.status not in _TRY_AGAIN_STATUSES:
                    raise refusal_of(error) from error
                busy += 1
                if time.perf_counter() - started > self.config.setup_timeout:
                    raise EngineError(
                        f"The {self.kind} servers have been too busy for {self.config.setup_timeout:g} s: lower "
                        f"rollout.max_concurrent_samples, or use more servers. Last: {error}"
                    ) from error
                await asyncio.sleep(min(0.1 * 2 ** min(busy, 5), 2.0))
            finally:
                if self._router is not None:
                    self._router.give_back(server)
        response = self.read_answer(request, data, version_when_sent)
        response.latency = time.perf_counter() - started
        response.logprobs_shifted, response.server = shifted, server.address
        return response

    def read_answer(self, request: ModelRequest, data: dict[str, Any], version_when_sent: int) -> ModelResponse:
        """What a server's answer says.

        Raises:
            EngineError: it contradicts itself, or is not in the protocol's form.
        """
        try:
            response = self.response(request, data, version_when_sent)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"An answer is not in the form of {self.kind}'s {self.generate_path} ({type(error).__name__}: {error}): "
                f"{str(data)[:200]!r}. See that the addresses are those of {self.kind} servers: {', '.join(self.addresses)}."
            ) from error
        if len(response.output_logprobs) != len(response.output_tokens):
            raise EngineError(
                f"The {self.kind} server returned {len(response.output_tokens)} tokens and {len(response.output_logprobs)} "
                "log-probabilities; a request needs both from one sampling."
            )
        if any(not math.isfinite(value) or value <= _NO_LOGPROB for value in response.output_logprobs):
            raise EngineError(
                f"The {self.kind} server returned log-probabilities that are not finite: {response.output_logprobs[:8]}."
            )
        response.rid, response.temperature = request.rid, request.gconfig.effective_temperature
        if response.stop_reason not in _STOP_REASONS:
            raise EngineError(
                f"The {self.kind} server ended a request with finish_reason {response.stop_reason!r}; those that its tokens can be "
                f"used with are {', '.join(_STOP_REASONS)}. See the server's log."
            )
        return response

    async def _lease(self, conversation: str) -> Server:
        deadline = time.monotonic() + self.config.setup_timeout
        while True:
            if self._router is None:
                raise RequestAborted(f"{type(self).__name__} was closed or never connected; call initialize() first.")
            if not self._holding:
                server = self._router.choose(conversation)
                if server is not None:
                    return server
                self._raise_if_all_ended()
            if not self._holding and time.monotonic() > deadline:
                raise EngineError(
                    f"No {self.kind} server has been in service for {self.config.setup_timeout:g} s: {self._router.describe()}."
                )
            await asyncio.sleep(0.05)

    def version_number(self, label: Any) -> int:
        """The number of a server's version label.

        Raises:
            EngineError: the label is not a number: the server's weights were changed by somebody else.
        """
        try:
            return int(label)
        except (TypeError, ValueError):
            raise EngineError(
                f"The {self.kind} server names its weights {label!r}, which is no version number: something else changed them. "
                "Publish weights again, or restart the server."
            ) from None

    def abort(self, rid: str | None = None) -> None:
        """End the requests of one conversation, or all that this client sent; they return what they have.

        On an event loop it does not wait for the servers, as the loop's other tasks would wait with it.
        """
        sent = [] if self._router is None else self._router.by_server(rid)
        asked = [self.submit(self._abort_quietly, *entry) for entry in sent]
        if asyncio._get_running_loop() is None:
            for future in asked:
                future.result()

    def _abort_quietly(self, server: Server, wire_ids: list[str]) -> None:
        try:
            self.abort_on_server(server, wire_ids)
        except EngineError as error:  # its requests end with their connections, or are given up when it is taken out
            logger.warning("The server at %s was asked to abort %d requests: %s", server.address, len(wire_ids), error)
