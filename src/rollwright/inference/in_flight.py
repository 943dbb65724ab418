"""The requests of a client that its servers have not answered yet: to be aborted there, or given up here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

from rollwright.inference.connections import ConnectionLostError
from rollwright.inference.router import Server


@dataclass(eq=False)
class _Sent:
    """One request on its way."""

    wire_id: str
    conversation: str
    server: Server
    loop: asyncio.AbstractEventLoop
    scope: asyncio.Timeout


class InFlight:
    """Requests by the ids that they have on the wire; safe to use from several threads and event loops."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._sent: dict[str, _Sent] = {}
        self._lock = threading.Lock()

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

    def give_up(self, server: Server) -> int:
        """End the wait for everything that is with ``server``: who sent it hears of a lost connection, and asks elsewhere.

        Returns:
            How many requests that were.
        """
        with self._lock:
            given_up = [one for one in self._sent.values() if one.server is server]
        for one in given_up:
            with contextlib.suppress(RuntimeError):  # its loop was closed: nobody waits any more
                one.loop.call_soon_threadsafe(_expire, one.scope)
        return len(given_up)


def _expire(scope: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # it was answered at this moment
        scope.reschedule(asyncio.get_running_loop().time())
