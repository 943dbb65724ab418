"""Which server a request goes to, which requests have no answer yet, and which servers answer at all.

A request goes to its conversation's server, else to the one with the fewest requests. Invariants:

* requests of one conversation go to one server for as long as that server is in service;
* a server that was taken out gets no request until it is put back;
* a server that stops answering is taken out, and put back only after the client has made it fit to serve again;
* the load of a server is the number of leases that were taken and not returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from rollwright.errors import EngineError
from rollwright.inference.connections import ConnectionLostError
from rollwright.inference.network import server_url
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteEngine")


@dataclass
class Server:
    """One inference server as its clients see it."""

    address: str
    url: str = ""
    in_service: bool = True
    reason: str = ""  # why it is out of service
    load: int = 0  # requests in flight
    served: int = 0  # requests sent since the start
    has_doubtful_weights: bool = False  # an update of them failed: its label proves nothing
    failed_checks: int = 0  # health checks in a row, while in service
    suspected_at: float = -math.inf  # ``time.monotonic()`` of the newest check after a failed request
    suspicion: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.url = self.url or server_url(self.address)


@dataclass(eq=False)
class _Sent:
    """One request on its way."""

    wire_id: str
    conversation: str
    server: Server
    loop: asyncio.AbstractEventLoop
    scope: asyncio.Timeout


class Router:
    """Chooses servers and keeps what they were asked; safe to use from several threads and event loops."""

    def __init__(self, addresses: Iterable[str], max_conversations: int = 1 << 16) -> None:
        """Args:
        addresses: ``host:port`` of each server.
        max_conversations: remembered conversations; the longest unused is forgotten first.

        Raises:
            EngineError: no address is given.
        """
        self.servers = [Server(address) for address in dict.fromkeys(addresses)]
        if not self.servers:
            raise EngineError(
                "There is no inference server to send requests to: give rollout.addresses, call connect_engine, or set "
                "ROLLWRIGHT_LLM_SERVER_ADDRS to host:port,host:port."
            )
        self._max_conversations = max_conversations
        self._server_of: OrderedDict[str, Server] = OrderedDict()
        self._numbers = itertools.count()
        self._sent: dict[str, _Sent] = {}  # by the ids that requests have on the wire
        self._lock = threading.Lock()
        self.changes = 0  # how often a server was taken out or put back

    def choose(self, conversation: str) -> Server | None:
        """Take a lease on the server for a conversation; None where no server is in service."""
        with self._lock:
            server = self._server_of.get(conversation)
            if server is None or not server.in_service:
                available = [candidate for candidate in self.servers if candidate.in_service]
                if not available:
                    return None
                server = min(available, key=lambda candidate: (candidate.load, candidate.served))
            self._server_of[conversation] = server
            self._server_of.move_to_end(conversation)
            if len(self._server_of) > self._max_conversations:
                self._server_of.popitem(last=False)
            server.load += 1
            server.served += 1
            return server

    def give_back(self, server: Server) -> None:
        """End a lease."""
        with self._lock:
            server.load -= 1

    def take_out(self, server: Server, reason: str) -> None:
        """Send nothing more to ``server``, and let its requests be asked elsewhere. Idempotent.

        Where it is the last one, its requests stay with it: it may answer yet, and nobody else can.
        """
        with self._lock:
            if not server.in_service:
                return
            server.in_service, server.reason = False, reason
            self.changes += 1
        logger.error("The server at %s is out of service: %s", server.address, reason)
        if self.in_service():
            self.give_up(server)

    def put_back(self, server: Server) -> None:
        """Send requests to ``server`` again."""
        with self._lock:
            self.changes += not server.in_service
            server.in_service, server.reason = True, ""

    def replace(self, addresses: Iterable[str]) -> None:
        """Use the servers at these addresses from now on; new ones are out of service until the client has brought them in."""
        wanted = dict.fromkeys(addresses)
        with self._lock:
            known = {server.address: server for server in self.servers}
            left = [server for address, server in known.items() if address not in wanted]
            self.servers = [known.get(each) or Server(each, in_service=False, reason="it has just joined") for each in wanted]
            for server in left:
                server.in_service, server.reason = False, "it has left"
            self.changes += bool(left)
        for server in left:
            self.give_up(server)

    def in_service(self) -> list[Server]:
        """Servers that requests are sent to."""
        with self._lock:
            return [server for server in self.servers if server.in_service]

    def describe(self) -> str:
        """One line on the state of every server, for messages."""
        with self._lock:
            return "; ".join(
                f"{server.address}: {'in service' if server.in_service else 'out of service, ' + server.reason}"
                for server in self.servers
            )

    # -- requests on their way --------------------------------------------------------------------------------------------

    def new_wire_id(self, conversation: str) -> str:
        """An id that no other request of this client has, nor begins with: several requests of one conversation may run at once.

        SGLang aborts every request whose id begins with the one that is given, so each has an end.
        """
        return f"{conversation}/{next(self._numbers)};"

    @contextlib.asynccontextmanager
    async def send(self, conversation: str, server: Server) -> AsyncIterator[str]:
        """For as long as a request is with ``server``; gives its id on the wire.

        Raises:
            ConnectionLostError: the server was given up meanwhile.
        """
        scope = asyncio.timeout(None)
        sent = _Sent(self.new_wire_id(conversation), conversation, server, asyncio.get_running_loop(), scope)
        try:
            async with scope:
                with self._lock:
                    self._sent[sent.wire_id] = sent
                yield sent.wire_id
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise ConnectionLostError(
                f"The server at {server.address} was given up before it answered ({server.reason})."
            ) from error
        finally:
            with self._lock:
                self._sent.pop(sent.wire_id, None)

    def by_server(self, conversation: str | None = None) -> list[tuple[Server, list[str]]]:
        """Ids on the wire of one conversation, or of all, for each server that has some."""
        with self._lock:
            sent = [one for one in self._sent.values() if conversation is None or one.conversation == conversation]
        groups: dict[str, tuple[Server, list[str]]] = {}
        for one in sent:
            groups.setdefault(one.server.address, (one.server, []))[1].append(one.wire_id)
        return list(groups.values())

    def give_up(self, server: Server) -> None:
        """End the wait for everything that is with ``server``: its senders see a lost connection, and ask elsewhere."""
        with self._lock:
            given_up = [one for one in self._sent.values() if one.server is server]
        for one in given_up:
            with contextlib.suppress(RuntimeError):  # its loop was closed: nobody waits any more
                one.loop.call_soon_threadsafe(_expire, one.scope)


def _expire(scope: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # it was answered at this moment
        scope.reschedule(asyncio.get_running_loop().time())


class HealthMonitor:
    """One thread that takes out servers that stop answering, and brings them back when they are fit to serve."""

    def __init__(self, client: Any, *, interval: float = 1.0, check_interval: float = 15.0, strikes: int = 3) -> None:
        """Args:
        client: a ``RemoteServers``, whose servers are checked, taken out and brought back. While it is paused, those in
            service are not checked, as a paused server may not answer a check that generates.
        interval: seconds between two looks at the servers that are out.
        check_interval: seconds between two checks of a server in service.
        strikes: failed checks in a row after which a server in service is taken out.
        """
        self._client = client
        self._router = client.router
        self._interval = interval
        self._check_interval = check_interval
        self._strikes = strikes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for a check that runs, at most a moment."""
        self._stop.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def suspect(self, server: Server, reason: str) -> None:
        """A request failed: check ``server`` now and take it out unless it answers. A burst of failures checks once."""
        with server.suspicion:
            if not server.in_service or time.monotonic() - server.suspected_at < 0.5:
                return
            healthy = self._client._is_healthy(server)
            server.suspected_at = time.monotonic()
        if healthy:
            logger.warning("%s The server answers its health check; the request is sent again.", reason)
        else:
            self._router.take_out(server, f"it does not answer: {reason}")

    def _run(self) -> None:
        last_check = time.monotonic()
        while not self._stop.wait(self._interval):
            is_due = time.monotonic() - last_check >= self._check_interval and not self._client.is_paused
            last_check = time.monotonic() if is_due else last_check
            try:
                for server in self._router.servers:
                    if not server.in_service:
                        self._try_back(server)
                    elif is_due:
                        self._check(server)
            except Exception:  # unforeseen by definition; without this thread no server would ever come back
                if not self._stop.is_set():
                    logger.exception("Watching the servers failed, and goes on.")

    def _try_back(self, server: Server) -> None:
        if self._stop.is_set() or not self._client._is_healthy(server):
            return
        try:
            self._client._bring_back(server)
        except EngineError as error:
            if server.reason != str(error):
                logger.warning("The server at %s answers again and stays out of service: %s", server.address, error)
            server.reason = str(error)
            return
        server.failed_checks = 0
        logger.info("The server at %s is back in service.", server.address)

    def _check(self, server: Server) -> None:
        server.failed_checks = 0 if self._client._is_healthy(server) else server.failed_checks + 1
        if server.failed_checks >= self._strikes:
            self._router.take_out(server, f"it failed {server.failed_checks} health checks in a row")
