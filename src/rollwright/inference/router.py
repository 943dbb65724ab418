"""Routing: which server a request goes to, which servers are in service, and which requests are unanswered.

A request goes to the server of its conversation, or else to the server with the fewest requests. Invariants:

* requests of one conversation go to one server as long as that server is in service;
* a server that was taken out gets no requests until it is put back;
* the load of a server is the number of leases that were taken and not returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from rollwright.errors import EngineError
from rollwright.inference.connections import ConnectionLostError
from rollwright.inference.network import server_url
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteEngine")


@dataclass(eq=False)
class Server:
    """An inference server as seen from this process."""

    address: str
    url: str = ""
    in_service: bool = True
    reason: str = ""  # why it is out of service
    load: int = 0  # requests in flight
    served: int = 0  # requests sent since the start
    lacks_weights: bool = False  # it answers, but only a publication can give it the current weights
    awaits_proof: bool = False  # it holds the current weights, but the trainer has not proven it (``weights.server_proofs``)
    has_doubtful_weights: bool = False  # an update failed, so its version label proves nothing
    failed_checks: int = 0  # failed health checks in a row, while in service
    suspected_at: float = -math.inf  # ``time.monotonic()`` of the last check after a failed request
    suspicion: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.url = self.url or server_url(self.address)


@dataclass(eq=False)
class _Sent:
    """A request without an answer yet."""

    wire_id: str
    conversation: str
    server: Server
    loop: asyncio.AbstractEventLoop
    scope: asyncio.Timeout


class Router:
    """Chooses servers and tracks their unanswered requests. Safe to use from several threads and event loops."""

    def __init__(self, addresses: Iterable[str], max_conversations: int = 1 << 16) -> None:
        """Args:
        addresses: ``host:port`` of each server.
        max_conversations: number of conversations to remember; the least recently used is forgotten first.

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
        self._sent: dict[str, _Sent] = {}  # by wire id
        self._lock = threading.Lock()
        self.changes = 0  # how often a server was taken out or put back

    def choose(self, conversation: str) -> Server | None:
        """Take a lease on the server for a conversation. Returns None if no server is in service."""
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
        """Send no more requests to ``server``, and send its unanswered requests to other servers. Idempotent.

        The last server keeps its requests: it may still answer, and no other server can.
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
            server.in_service, server.reason, server.lacks_weights = True, "", False

    def replace(self, addresses: Iterable[str]) -> None:
        """Use the servers at these addresses from now on. New servers stay out of service until they are put back."""
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
        """Return the servers that requests are sent to."""
        with self._lock:
            return [server for server in self.servers if server.in_service]

    def describe(self) -> str:
        """Describe the state of every server in one line, for messages."""
        with self._lock:
            return "; ".join(
                f"{server.address}: {'in service' if server.in_service else 'out of service, ' + server.reason}"
                for server in self.servers
            )

    # -- unanswered requests ---------------------------------------------------------------------------------------------

    def new_wire_id(self, conversation: str) -> str:
        """Return an id to send with a request. It is unique in this router, because one conversation may have several requests at once.

        SGLang aborts every request whose id begins with the given one, so each id has a terminator.
        """
        return f"{conversation}/{next(self._numbers)};"

    @contextlib.asynccontextmanager
    async def send(self, conversation: str, server: Server) -> AsyncIterator[str]:
        """Register a request to ``server`` for the duration of the block; yields its wire id.

        Raises:
            ConnectionLostError: the server was given up in the meantime.
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
        """Return the wire ids of the unanswered requests of one conversation, or of all conversations, by server."""
        with self._lock:
            sent = [one for one in self._sent.values() if conversation is None or one.conversation == conversation]
        groups: dict[str, tuple[Server, list[str]]] = {}
        for one in sent:
            groups.setdefault(one.server.address, (one.server, []))[1].append(one.wire_id)
        return list(groups.values())

    def give_up(self, server: Server) -> None:
        """Stop waiting for all requests of ``server``; their senders see a lost connection and use another server."""
        with self._lock:
            given_up = [one for one in self._sent.values() if one.server is server]
        for one in given_up:
            with contextlib.suppress(RuntimeError):  # its loop was closed, so nobody waits any more
                one.loop.call_soon_threadsafe(_expire, one.scope)


def _expire(scope: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # it was answered just now
        scope.reschedule(asyncio.get_running_loop().time())
