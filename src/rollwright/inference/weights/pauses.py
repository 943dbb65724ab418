"""Pauses: no server samples between ``pause`` and ``resume``, and a client may hold back what it would ask.

Invariant: a pause, a publication and the return of a server never overlap (``_update_lock``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator

from rollwright.config.sections import RolloutConfig
from rollwright.errors import WeightUpdateError
from rollwright.inference.remote_requests import RemoteRequests
from rollwright.inference.router import Server


class RemotePauses(RemoteRequests):
    """A client that pauses its servers."""

    @abstractmethod
    def pause_server(self, server: Server) -> None:
        """Stop sampling; what runs keeps its tokens."""

    @abstractmethod
    def resume_server(self, server: Server) -> None:
        """Go on after ``pause_server``."""

    def __init__(self, config: RolloutConfig | None = None, *, addresses: Iterable[str] | None = None) -> None:
        super().__init__(config, addresses=addresses)
        self._when_resumed: Callable[[], object] | None = None
        # Held by a publication, by pause and resume, and while a server is brought back: none of them sees half of another.
        self._update_lock = threading.RLock()

    def pause(self) -> None:
        """Stop sampling on every server; a server that cannot be paused is taken out.

        Raises:
            EngineError: all servers that were started for this client have ended.
        """
        with self._update_lock:
            self.is_paused = True
            try:
                self._each_in_service(self.pause_server, "be paused")
            except BaseException:
                self.is_paused = self._holding = False
                raise

    def resume(self) -> None:
        """Go on after ``pause``, and call what ``when_resumed`` was given; a server that cannot go on is taken out.

        Raises:
            EngineError: all servers that were started for this client have ended.
        """
        with self._update_lock:
            try:
                self._each_in_service(self.resume_server, "go on")
            finally:
                self.is_paused = self._holding = False
        action, self._when_resumed = self._when_resumed, None
        if action is not None:
            action()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Between ``pause`` and ``resume``; where this client is paused already, it stays so."""
        if self.is_paused:
            yield
            return
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def when_resumed(self, action: Callable[[], object]) -> None:
        """See ``WeightReceiver.when_resumed``; of several actions the last is called."""
        if self.is_paused:
            self._when_resumed = action
        else:
            action()

    def hold(self, *, drained: bool) -> None:
        """Ask for nothing more, until ``resume``; or until ``follow``, where another client pauses the servers.

        Args:
            drained: return when what was asked is answered. Not on the event loop that awaits it.

        Raises:
            WeightUpdateError: it was not answered within ``request_timeout``.
        """
        self._holding = True
        deadline = time.monotonic() + self.config.request_timeout
        while drained and any(server.load for server in self.router.in_service()):
            if time.monotonic() > deadline:
                self._holding = False
                raise WeightUpdateError(
                    f"Requests in flight did not end within {self.config.request_timeout:g} s (rollout.on_weight_update=wait): "
                    "use recompute, or call from another thread than the one that awaits them."
                )
            time.sleep(0.01)
