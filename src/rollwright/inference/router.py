"""Which server a request goes to: its conversation's, else the one with the fewest requests.

Invariants:

* requests of one conversation go to one server for as long as that server is in service;
* a server that was taken out gets no request until it is put back;
* the load of a server is the number of leases that were taken and not given back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rollwright.errors import EngineError
from rollwright.inference.network import server_url


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

    def __post_init__(self) -> None:
        self.url = self.url or server_url(self.address)


class Router:
    """Chooses servers; safe to use from several threads and event loops."""

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

    @contextmanager
    def lease(self, server: Server) -> Iterator[Server]:
        """Give ``server`` back on leaving."""
        try:
            yield server
        finally:
            self.give_back(server)

    def take_out(self, server: Server, reason: str) -> bool:
        """Send nothing more to ``server``; True where it was in service until now."""
        with self._lock:
            was_in_service = server.in_service
            if was_in_service:
                server.in_service, server.reason = False, reason
                self.changes += 1
            return was_in_service

    def put_back(self, server: Server) -> None:
        """Send requests to ``server`` again."""
        with self._lock:
            self.changes += not server.in_service
            server.in_service, server.reason = True, ""

    def in_service(self) -> list[Server]:
        """Servers that requests are sent to."""
        with self._lock:
            return [server for server in self.servers if server.in_service]

    def out_of_service(self) -> list[Server]:
        """Servers that were taken out."""
        with self._lock:
            return [server for server in self.servers if not server.in_service]

    def describe(self) -> str:
        """One line on the state of every server, for messages."""
        with self._lock:
            return "; ".join(
                f"{server.address}: {'in service' if server.in_service else 'out of service, ' + server.reason}"
                for server in self.servers
            )
