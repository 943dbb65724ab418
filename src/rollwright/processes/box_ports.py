"""Ports on a box's loopback interface that lead to Unix sockets. It runs inside the box and uses only the standard library."""

from __future__ import annotations

import contextlib
import selectors
import socket

_MOST_BYTES = 1 << 18  # that wait in one direction of a connection
_MOST_CONNECTIONS = 256


class Forwarder:
    """Accepts connections on a loopback port and connects each to a Unix socket.

    Args:
        selector: calls the data of a key when its socket is ready.
        port: wanted port. If something else has it, as on a loopback interface that is shared, a free port is used.
        path: path of the Unix socket.

    Attributes:
        port: the port.
    """

    def __init__(self, selector: selectors.BaseSelector, port: int, path: str) -> None:
        self._selector, self._path = selector, path
        self._connections: set[Relay] = set()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(("127.0.0.1", port))
        except OSError:
            self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the client has given up
            near, _ = self._listener.accept()
            self._connections = {relay for relay in self._connections if relay.is_open}
            far = socket.socket(socket.AF_UNIX)
            try:
                if len(self._connections) >= _MOST_CONNECTIONS:
                    raise ConnectionRefusedError
                far.connect(self._path)
                self._connections.add(Relay(self._selector, near, far))
            except OSError:
                near.close()
                far.close()


class Relay:
    """Copies bytes between two sockets, in both directions, until both have ended."""

    def __init__(self, selector: selectors.BaseSelector, near: socket.socket, far: socket.socket) -> None:
        self._selector = selector
        self._other = {near: far, far: near}
        self._waiting = {near: bytearray(), far: bytearray()}  # bytes for a socket
        self._ended: set[socket.socket] = set()  # sockets that were read to their end
        self.is_open = True
        for each in self._other:
            each.setblocking(False)
        self._watch()

    def move(self) -> None:
        """Copy what can be copied now."""
        if not self.is_open:  # both sockets were ready at once, and the first of them ended it
            return
        try:
            for each, other in self._other.items():
                self._read(each, other)
                self._write(other, each)
        except OSError:
            self.close()
            return
        self._watch()

    def close(self) -> None:
        """Close both sockets."""
        for each in self._other:
            with contextlib.suppress(KeyError):
                self._selector.unregister(each)
            each.close()
        self.is_open = False

    def _read(self, source: socket.socket, other: socket.socket) -> None:
        if source not in self._ended and len(self._waiting[other]) < _MOST_BYTES:
            with contextlib.suppress(BlockingIOError):
                if content := source.recv(65536):
                    self._waiting[other] += content
                else:
                    self._ended.add(source)

    def _write(self, target: socket.socket, source: socket.socket) -> None:
        waiting = self._waiting[target]
        if waiting:
            with contextlib.suppress(BlockingIOError):
                del waiting[: target.send(waiting)]
        if not waiting and source in self._ended:
            with contextlib.suppress(OSError):  # it was shut down before, or has gone
                target.shutdown(socket.SHUT_WR)

    def _watch(self) -> None:
        """Register for what can happen next, and close if nothing can."""
        if len(self._ended) == 2 and not any(self._waiting.values()):
            self.close()
            return
        for each, other in self._other.items():
            reads = each not in self._ended and len(self._waiting[other]) < _MOST_BYTES
            events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if self._waiting[each] else 0)
            is_registered = each in self._selector.get_map()
            if events and is_registered:
                self._selector.modify(each, events, self.move)
            elif events:
                self._selector.register(each, events, self.move)
            elif is_registered:
                self._selector.unregister(each)
