"""Control calls to a server that ends its connections as uvicorn does."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading

import pytest

from rollwright.inference.connections import Connections, ServerRefusedError

#: ``SO_LINGER`` that makes ``close`` send a reset.
RESET = struct.pack("ii", 1, 0)


@contextlib.contextmanager
def server_that_resets():
    """Answers the first request of each connection, names it as kept alive, and resets it when more is sent.

    Uvicorn does so a moment after an exception: what arrives in that moment is lost. Yields the address and the paths that were asked.
    """
    asked: list[str] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            path = connection.recv(65536).split()[1].decode()
            asked.append(path)
            status = "500 Internal Server Error" if path == "/refused" else "200 OK"
            body = json.dumps({"error": "already active"} if path == "/refused" else {"path": path})
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
            connection.settimeout(10)
            connection.recv(1)  # a second request, or the end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):  # closed at the end
                while True:
                    connection, _ = listening.accept()
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        listening.shutdown(socket.SHUT_RDWR)


def test_the_call_after_a_refused_one_has_a_connection_of_its_own():
    with server_that_resets() as (url, asked):
        connections = Connections()
        with pytest.raises(ServerRefusedError, match="already active") as refused:
            connections.request("POST", f"{url}/refused", {})
        assert refused.value.status == 500
        assert connections.request("POST", f"{url}/finish", {}) == {"path": "/finish"}
        assert connections.request("GET", f"{url}/again") == {"path": "/again"}
        connections.close()
        assert asked == ["/refused", "/finish", "/again"]
