"""A client of inference servers: what is the same for every protocol.

Invariants:

* a token's version is the one that the server says; where a server cannot say it, an update in flight is an error, not a
  guess;
* a request is sent again only where its connection failed before a response began;
* a server that stops answering is taken out; it is put back only after it holds the weights of the current version.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.errors import EngineError, RequestAborted, WeightUpdateError
from rollwright.inference.connections import ConnectionLostError, Connections, ServerRefusedError, refusal_of
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.health import HealthMonitor
from rollwright.inference.network import find_server_addresses
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.router import Router, Server
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteEngine")

#: Clients of this process that are connected; see ``connected_clients``.
_CONNECTED: weakref.WeakValueDictionary[int, RemoteClient] = weakref.WeakValueDictionary()
_connections_made = itertools.count()


def connected_clients() -> list[RemoteClient]:
    """The clients of this process that are connected to servers, in the order in which they connected.

    Here a trainer finds the rollout engine that it was not given.
    """
    return [client for _, client in sorted(_CONNECTED.items())]


#: Statuses of a server that is busy or restarting, not of a wrong request.
_TRY_AGAIN_STATUSES = {429, 502, 503, 504}


class RemoteClient(InferenceEngine):
    """An ``InferenceEngine`` over HTTP servers of one kind."""

    kind = "remote"
    #: Path that tokens are asked for at.
    generate_path = "/generate"

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
        self._fan_out: ThreadPoolExecutor | None = None
        self._version = 0
        self._paused = False
        self._holding = False  # new requests wait on this side
        self._owned: list[Any] = []
        self._wire_ids = itertools.count()
        self._live: dict[str, set[str]] = {}  # conversation -> ids of its requests in flight
        self._live_on: dict[str, Server] = {}
        self._lock = threading.Lock()

    # -- what a protocol adds ------------------------------------------------------------------------------------------

    @abstractmethod
    def _payload(self, request: ModelRequest, wire_id: str) -> dict[str, Any]:
        """The body of one generation request."""

    @abstractmethod
    def _response(self, request: ModelRequest, data: dict[str, Any], version_when_sent: int) -> ModelResponse:
        """What the server's answer says."""

    @abstractmethod
    def _check(self, request: ModelRequest, server: str) -> bool:
        """Refuse what these servers cannot do; True where the log-probabilities will not be the contract's."""

    @abstractmethod
    def _pause_server(self, server: Server) -> None: ...

    @abstractmethod
    def _resume_server(self, server: Server) -> None: ...

    @abstractmethod
    def _abort_on_server(self, server: Server, wire_ids: list[str] | None) -> None: ...

    @abstractmethod
    def _read_version(self, server: Server) -> str | None:
        """The server's label of its weights."""

    @abstractmethod
    def _label_version(self, server: Server, version: int) -> None:
        """Give the weights that the server holds a version number."""

    @abstractmethod
    def _bring_back(self, server: Server) -> None:
        """Make a server that answers again fit to serve, and put it back."""

    def _on_connected(self, server: Server) -> None:
        """Look at a server that just became healthy, for the first time or again."""

    # -- life ----------------------------------------------------------------------------------------------------------

    def initialize(self, *args: Any, addresses: Iterable[str] | None = None, **kwargs: Any) -> None:
        """Find the servers, wait until each is healthy, and read the version of their weights.

        Args:
            addresses: servers; None: those given on construction, in the config or in the environment.

        Raises:
            EngineError: no server is known, or one is not healthy within ``setup_timeout``.
        """
        if self._router is not None:
            return
        found = list(addresses) if addresses is not None else self._given_addresses
        router = Router(found if found is not None else find_server_addresses(self.config.addresses))
        api_key = self.config.api_key or os.environ.get("ROLLWRIGHT_API_KEY")
        self._connections = Connections(api_key=api_key, timeout=self.config.request_timeout)
        self._fan_out = ThreadPoolExecutor(max(4, len(router.servers)), thread_name_prefix=f"{self.kind}-control")
        self._router = router
        try:
            deadline = time.monotonic() + self.config.setup_timeout
            self._each(lambda server: self._wait_healthy(server, deadline), router.servers)
            self._each(self._on_connected, router.servers)
            self._adopt_version(router.servers)
        except BaseException:
            self.destroy()
            raise
        self._monitor = HealthMonitor(router, self._is_healthy, self._bring_back, skip_in_service=lambda: self._paused)
        self._monitor.start()
        _CONNECTED[next(_connections_made)] = self
        logger.info("%s servers in use: %s", self.kind, ", ".join(server.address for server in router.servers))

    def destroy(self) -> None:
        """Stop watching the servers and close every connection. Servers run on unless they were handed over with ``own``."""
        for number in [number for number, client in _CONNECTED.items() if client is self]:
            del _CONNECTED[number]
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None
        if self._fan_out is not None:
            self._fan_out.shutdown(wait=False, cancel_futures=True)
            self._fan_out = None
        if self._connections is not None:
            self._connections.close()
        self._router = None
        while self._owned:
            self._owned.pop().close()

    def own(self, resource: Any) -> None:
        """Close ``resource`` (servers that were started for this client) when this client is destroyed.

        Args:
            resource: has ``close()``, ``check()`` that raises when no server of it is left, and ``weights_root``, a directory
                that is shared with them.
        """
        self._owned.append(resource)

    def _wait_healthy(self, server: Server, deadline: float) -> None:
        while not self._is_healthy(server):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"The {self.kind} server at {server.address} was not healthy within {self.config.setup_timeout:g} s. Look at "
                    "its log; raise rollout.setup_timeout if its model takes longer to load."
                )
            time.sleep(0.2)

    def _is_healthy(self, server: Server) -> bool:
        try:
            self.connections.request("GET", f"{server.url}/health", timeout=10.0)
        except EngineError:
            return False
        return True

    @property
    def connections(self) -> Connections:
        """The HTTP connections of this client."""
        if self._connections is None:
            raise EngineError(f"{type(self).__name__} is not connected: call initialize() first.")
        return self._connections

    @property
    def router(self) -> Router:
        """The servers and their load."""
        if self._router is None:
            raise EngineError(f"{type(self).__name__} is not connected: call initialize() first.")
        return self._router

    @property
    def addresses(self) -> list[str]:
        """Addresses of all servers, in service or not."""
        return [server.address for server in self.router.servers]

    # -- generation ----------------------------------------------------------------------------------------------------

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample one completion; see ``InferenceEngine.agenerate``.

        A connection that fails before a response began is tried again, on another server where this one is gone.

        Raises:
            PromptTooLongError: the server has no room for the prompt and a new token.
            RequestAborted: the client was closed.
            EngineError: a parameter cannot be honoured, the server refused, or no server is left.
        """
        shifted = self._check(request, ", ".join(self.addresses))
        started = time.perf_counter()
        last_error: EngineError | None = None
        for attempt in range(self.config.request_retries + 1):
            server = await self._lease(request.rid)
            wire_id = self._open(request.rid, server)
            version_when_sent = self._version
            try:
                payload = self._payload(request, wire_id)
                data = await self.connections.post(server.url + self.generate_path, payload)
            except ConnectionLostError as error:
                last_error = error
                logger.debug("%s Trying again (%d of %d).", error, attempt + 1, self.config.request_retries)
                await asyncio.to_thread(self._suspect, server, str(error))
                continue
            except ServerRefusedError as error:
                if error.status not in _TRY_AGAIN_STATUSES:
                    raise refusal_of(error) from error
                last_error = error
                await asyncio.sleep(min(0.1 * 2**attempt, 2.0))
                continue
            finally:
                self._close(request.rid, wire_id, server)
            response = self._response(request, data, version_when_sent)
            response.latency = time.perf_counter() - started
            response.logprobs_shifted = shifted
            return response
        raise EngineError(
            f"A request of conversation {request.rid!r} failed {self.config.request_retries + 1} times; servers: "
            f"{self.router.describe()}. Last: {last_error}"
        ) from last_error

    async def _lease(self, conversation: str) -> Server:
        deadline = time.monotonic() + self.config.setup_timeout
        while True:
            if self._router is None:
                raise RequestAborted(f"{type(self).__name__} was closed or never connected; call initialize() first.")
            if not self._holding:
                server = self._router.choose(conversation)
                if server is not None:
                    return server
                for servers in self._owned:
                    servers.check()
            if not self._holding and time.monotonic() > deadline:
                raise EngineError(
                    f"No {self.kind} server has been in service for {self.config.setup_timeout:g} s: {self._router.describe()}."
                )
            await asyncio.sleep(0.05)

    def _open(self, conversation: str, server: Server) -> str:
        wire_id = f"{conversation}/{next(self._wire_ids)}"
        with self._lock:
            self._live.setdefault(conversation, set()).add(wire_id)
            self._live_on[wire_id] = server
        return wire_id

    def _close(self, conversation: str, wire_id: str, server: Server) -> None:
        with self._lock:
            self._live_on.pop(wire_id, None)
            ids = self._live.get(conversation, set())
            ids.discard(wire_id)
            if not ids:
                self._live.pop(conversation, None)
        if self._router is not None:
            self._router.give_back(server)

    def _suspect(self, server: Server, reason: str) -> None:
        """Take ``server`` out unless it answers: one check for a burst of failures."""
        if self._monitor is not None:
            self._monitor.suspect(server, reason)

    # -- versions ------------------------------------------------------------------------------------------------------

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

    def _adopt_version(self, servers: list[Server]) -> None:
        """Number the weights of servers that were just started; take over the number where they already have one."""
        numbers: dict[str, int] = {}
        for server, label in zip(servers, self._each(self._read_version, servers), strict=True):
            if label is None or not str(label).lstrip("-").isdigit():
                self._label_version(server, self._version)
                label = self._version
            numbers[server.address] = int(label)
        if len(set(numbers.values())) > 1:
            raise WeightUpdateError(
                f"The {self.kind} servers hold different weights (versions {numbers}). Publish weights to all, or restart them."
            )
        (self._version,) = set(numbers.values())

    def get_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._version

    def set_version(self, version: int) -> None:
        """Confirm a published version.

        Another client may have published it, so the servers are asked before it is an error.

        Raises:
            WeightUpdateError: the servers hold another version.
        """
        if version == self._version:
            return
        servers = self.router.in_service()
        held = {server.address: label for server, label in zip(servers, self._each(self._read_version, servers), strict=True)}
        if not held or any(str(label) != str(version) for label in held.values()):
            raise WeightUpdateError(
                f"set_version({version}) does not match what the {self.kind} servers hold: {held}. Versions are set by "
                "publishing weights (actor.update_weights); set_version only confirms them."
            )
        self._version = version

    # -- control -------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop sampling on every server; requests keep what they have."""
        with self._lock:
            self._paused = True
        self._each(self._pause_server, self.router.in_service())

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._each(self._resume_server, self.router.in_service())
        with self._lock:
            self._paused = self._holding = False

    def drain(self) -> None:
        """Hold new requests back and wait until those in flight have ended; ``resume`` lets them go on.

        Not to be called on the event loop that awaits them.

        Raises:
            WeightUpdateError: they did not end within ``request_timeout``.
        """
        self._holding = True
        deadline = time.monotonic() + self.config.request_timeout
        while any(server.load for server in self.router.in_service()):
            if time.monotonic() > deadline:
                self._holding = False
                raise WeightUpdateError(
                    f"Requests in flight did not end within {self.config.request_timeout:g} s (rollout.on_weight_update=wait): "
                    "use recompute, or call from another thread than the one that awaits them."
                )
            time.sleep(0.01)

    @property
    def is_paused(self) -> bool:
        """True between ``pause`` and ``resume`` of this client."""
        return self._paused

    def abort(self, rid: str | None = None) -> None:
        """End the requests of one conversation, or all that this client sent; they return what they have."""
        by_server: dict[int, tuple[Server, list[str]]] = {}
        with self._lock:
            wire_ids = list(self._live_on) if rid is None else list(self._live.get(rid, ()))
            for wire_id in wire_ids:
                server = self._live_on[wire_id]
                by_server.setdefault(id(server), (server, []))[1].append(wire_id)
        for server, ids in by_server.values():
            self._abort_on_server(server, ids)

    def _each(self, action: Callable[[Server], Any], servers: Iterable[Server]) -> list[Any]:
        """``action`` on all servers at once; the first failure is raised after all are done."""
        if self._fan_out is None:
            raise EngineError(f"{type(self).__name__} is not connected: call initialize() first.")
        futures = [self._fan_out.submit(action, server) for server in servers]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
