"""The relay between a box's loopback and a Unix socket."""

from __future__ import annotations

import selectors
import socket

from rollwright.processes.box_ports import Relay


def test_a_relay_whose_ends_close_together_ends_once():
    """Process 1 of a box serves the relays, so an exception there would end the box."""
    near, client = socket.socketpair()
    far, server = socket.socketpair()
    with selectors.DefaultSelector() as selector:
        relay = Relay(selector, near, far)
        client.sendall(b"a request")
        client.close()
        relay.move()
        assert server.recv(100) == b"a request"
        server.close()
        ready = [key.data for key, _ in selector.select(1)]
        assert ready
        for move in [*ready, *ready]:
            move()
        assert not relay.is_open
