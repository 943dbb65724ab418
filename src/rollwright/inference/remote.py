"""A client of inference servers, the same for every protocol: servers are found and watched, and asked for tokens.

Invariants:

* a token's version is the one that the server says; where a server cannot say it, an update in flight is an error, not a
  guess;
* a request is sent again only where its connection failed, or its server was given up, before a response began.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, EngineError, RequestAborted
from rollwright.inference.connections import ConnectionLostError, Connections, ServerRefusedError, refusal_of
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.launcher import ended_child
from rollwright.inference.network import find_server_addresses, parse_addresses
from rollwright.inference.parameters import ParameterTable
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.router import HealthMonitor, Router, Server
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteEngine")

Result = TypeVar("Result")
Part = TypeVar("Part")

#: Statuses of a server that is busy or restarting, not of a wrong request.
_TRY_AGAIN_STATUSES = {429, 502, 503, 504}
#: What vLLM writes for a log-probability of minus infinity.
_NO_LOGPROB = -9999.0
_STOP_REASONS = ("stop", "length", "abort")
#: Longest wait for a health check.
CHECK_SECONDS = 10.0

#: The clients of this process that are connected to servers, in the order in which they connected: here a trainer finds the
#: rollout engine that it was not given.
CONNECTED_CLIENTS: list[Any] = []
#: Arguments of ``initialize`` in programs written for AReaL that say nothing about servers.
_NOT_USED = {"engine_id", "train_data_parallel_size", "ft_spec"}


class RemoteRequests(InferenceEngine):
    """The half of a client that finds servers and asks them for tokens; the parts that it lacks are in
    ``inference.weights``: pauses, then versions, then publication, which is ``RemoteClient``.

    Attributes:
        kind: the servers' name in messages.
        generate_path: where tokens are asked for.
        parameters: how generation parameters travel.
        refused_inputs: parts of a request that these servers have no place for, and what to do then.
    """

    kind = "remote"
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

    def __init__(self, config: RolloutConfig | None = None, *, addresses: Iterable[str] | None = None) -> None:
        """Args:
        config: addresses, key, time limits and what happens to running requests on a weight update.
        addresses: servers; None: those of the config, else of the environment.
        """
        self.config = config or RolloutConfig()
        self._given_addresses = list(addresses) if addresses is not None else None
        self._connections: Connections | None = None
        self._router: Router | None = None
        self._monitor: HealthMonitor | None = None
        self._threads: ThreadPoolExecutor | None = None  # for calls to several servers at once
        self._owned: list[Any] = []
        self.is_paused = False  # between ``pause`` and ``resume`` of this client
        self._version = 0
        self._holding = False  # new requests wait on this side

    # -- what a backend defines ----------------------------------------------------------------------------------------

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

    def ask(self, server: Server, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> dict[str, Any]:
        """One call to a server, synchronously.

        Args:
            server: that is asked.
            method, path, body: of the call; the body is sent as JSON.
            timeout: seconds; None: ``setup_timeout``, so that a server that hangs does not hold the others up for ever.

        Raises:
            EngineError: as ``Connections.request``.
        """
        limit = self.config.setup_timeout if timeout is None else timeout
        return self.connections.request(method, f"{server.url}{path}", body, timeout=limit)

    @abstractmethod
    def _bring_back(self, server: Server) -> None:
        """Make a server that answers again fit to serve, and put it back."""

    def on_connected(self, server: Server) -> None:
        """Look at a server that just became healthy, for the first time or again."""

    # -- life ----------------------------------------------------------------------------------------------------------

    def initialize(
        self,
        *args: Any,
        addresses: str | Iterable[str] | None = None,
        addr: str | Iterable[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Find the servers, wait until each is healthy, and read the version of their weights.

        Args:
            args: not used.
            addresses: servers, as a list or in one text with commas; None: those given on construction, in the config or in
                the environment.
            addr: AReaL's name of ``addresses``.
            kwargs: AReaL's arguments about the trainer (``engine_id``, ``train_data_parallel_size``,
                ``ft_spec``); not used.

        Raises:
            ConfigError: an argument has no meaning, or an address is malformed.
            EngineError: no server is known, one has ended, or one is not healthy within ``setup_timeout``.
        """
        if unknown := sorted(set(kwargs) - _NOT_USED):
            raise ConfigError(f"initialize() has no argument {unknown[0]!r}; give addresses, or set rollout.addresses.")
        if addresses is not None and addr is not None:
            raise ConfigError("initialize() was given two lists of servers: give one of addresses and addr.")
        if self._router is not None:
            return
        named = addr if addresses is None else addresses
        named = parse_addresses(named) if isinstance(named, str) else named
        found = list(named) if named is not None else self._given_addresses
        router = Router(found if found is not None else find_server_addresses(self.config.addresses))
        api_key = self.config.api_key or os.environ.get("ROLLWRIGHT_API_KEY")
        self._connections = Connections(api_key=api_key, timeout=self.config.request_timeout)
        self._threads = ThreadPoolExecutor(max(4, len(router.servers)), thread_name_prefix=f"{self.kind}-control")
        self._router = router
        try:
            self._connect(router)
        except BaseException:
            self.destroy()
            raise
        self._monitor = HealthMonitor(self)
        CONNECTED_CLIENTS.append(self)
        logger.info("%s servers in use: %s", self.kind, ", ".join(server.address for server in router.servers))

    def _connect(self, router: Router) -> None:
        """Wait until every server is healthy, and look at each."""
        deadline = time.monotonic() + self.config.setup_timeout
        self.each(lambda server: self._wait_healthy(server, deadline), router.servers)
        self.each(self.on_connected, router.servers)

    def destroy(self) -> None:
        """Stop watching the servers and close every connection. Servers run on, except those that it owns (``own``)."""
        if self in CONNECTED_CLIENTS:
            CONNECTED_CLIENTS.remove(self)
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        if self._connections is not None:
            self._connections.close()
        self._router = None
        while self._owned:
            self._owned.pop().close()

    def own(self, resource: Any) -> None:
        """Close ``resource`` (servers that were started for this client) when this client is destroyed.

        Args:
            resource: has ``close()``, ``check(address)`` that raises when that server, or all of it, has ended, and ``weights_root``, a directory
                that is shared with them.
        """
        self._owned.append(resource)

    def _is_healthy(self, server: Server) -> bool:
        """One check: True where the server answers ``/health``."""
        try:
            self.connections.request("GET", f"{server.url}/health", timeout=CHECK_SECONDS)
        except EngineError:
            return False
        return True

    def _wait_healthy(self, server: Server, deadline: float) -> None:
        """Return when the server answers ``/health``; it is an error where it has ended, or does not until the deadline."""
        started = time.monotonic()
        while not self._is_healthy(server):
            for launched in self._owned:
                launched.check(server.address)
            if not self._owned and (command := ended_child(server.address)):
                raise EngineError(
                    f"The server at {server.address} ended before it was healthy: no child of this process runs the command that "
                    f"build_cmd gave for it. Look at its output, and start it again ({command}); where it was started elsewhere, call "
                    "initialize() again when it is healthy."
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"The server at {server.address} was not healthy within {deadline - started:.0f} s. Look at its log; raise "
                    "rollout.setup_timeout if its model takes longer to load."
                )
            time.sleep(0.2)

    def _connected(self, part: Part | None) -> Part:
        if part is None:
            raise EngineError(f"{type(self).__name__} is not connected: call initialize() first.")
        return part

    @property
    def connections(self) -> Connections:
        """The HTTP connections of this client."""
        return self._connected(self._connections)

    @property
    def router(self) -> Router:
        """The servers and their load."""
        return self._connected(self._router)

    @property
    def addresses(self) -> list[str]:
        """Addresses of all servers, in service or not."""
        return [server.address for server in self.router.servers]

    def use_servers(self, addresses: Iterable[str]) -> None:
        """Use the servers at these addresses from now on: what is with others is asked again, new ones join when they are fit to serve."""
        self.router.replace(addresses)

    # -- several servers at once ----------------------------------------------------------------------------------------

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Begin one call in a thread of this client."""
        return self._connected(self._threads).submit(function, *arguments)

    def settled(
        self, action: Callable[[Server], Result], servers: Iterable[Server], alongside: Callable[[], object] = lambda: None
    ) -> tuple[list[tuple[Server, Result]], list[tuple[Server, EngineError]]]:
        """``action`` on all servers at once: what those returned that did it, and why the others did not.

        ``alongside`` runs in this thread meanwhile.
        """
        done: list[tuple[Server, Result]] = []
        failed: list[tuple[Server, EngineError]] = []
        running = [(server, self.submit(action, server)) for server in servers]
        alongside()
        for server, future in running:
            error = future.exception()
            if error is None:
                done.append((server, future.result()))
            elif isinstance(error, EngineError):
                failed.append((server, error))
            else:
                raise error
        return done, failed

    def each(self, action: Callable[[Server], Result], servers: Iterable[Server]) -> list[Result]:
        """``action`` on all servers at once; the first failure is raised after all are done."""
        done, failed = self.settled(action, servers)
        if failed:
            raise failed[0][1]
        return [result for _, result in done]

    # -- in service and out ---------------------------------------------------------------------------------------------

    def _each_in_service(self, action: Callable[[Server], Result], what: str) -> list[tuple[Server, Result]]:
        """``action`` on all servers in service at once; those that raise an ``EngineError`` are taken out.

        Args:
            action: what is done.
            what: a server could not do, for the log.

        Raises:
            EngineError: all servers that were started for this client have ended.
        """
        done, failed = self.settled(action, self.router.in_service())
        for server, error in failed:
            self.router.take_out(server, f"it could not {what}: {error}")
        if failed and not done:
            self._raise_if_all_ended()
        return done

    def _raise_if_all_ended(self) -> None:
        for servers in self._owned:
            servers.check()

    # -- generation ----------------------------------------------------------------------------------------------------

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
