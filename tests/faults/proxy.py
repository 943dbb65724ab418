"""A TCP proxy between parts, which drops connections and delays what they carry."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Proxy:
    """Listens on ``port`` of this machine and passes on to ``target``, a port that may change.

    Attributes:
        delay: seconds that each piece waits before it is passed on.
        refuses: new connections are closed at once.
    """

    def __init__(self, target: int = 0) -> None:
        self.target = target
        self.delay = 0.0
        self.refuses = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def drop(self, seconds: float) -> None:
        """Break all connections, and take no new ones for a while."""
        self.refuses = True
        self._break()
        time.sleep(seconds)
        self.refuses = False

    def slow(self, delay: float, seconds: float) -> None:
        """Delay each piece for a while."""
        self.delay = delay
        time.sleep(seconds)
        self.delay = 0.0

    def close(self) -> None:
        """End it."""
        self.refuses = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._break()

    def _break(self) -> None:
        with self._lock:
            broken, self._open = self._open, set()
        for each in broken:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                incoming, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.refuses:
                    raise OSError
                outgoing = socket.create_connection(("127.0.0.1", self.target), timeout=10)
                outgoing.settimeout(None)
            except OSError:
                incoming.close()
                continue
            for each in (incoming, outgoing):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {incoming, outgoing}
            for pair in ((incoming, outgoing), (outgoing, incoming)):
                threading.Thread(target=self._pass_on, args=pair, name="proxied", daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65_536):
                if self.delay:
                    time.sleep(self.delay)
                sink.sendall(piece)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {source, sink}
        source.close()
