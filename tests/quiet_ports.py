"""Ports that stay free until somebody binds them, for programs that have to be told theirs before they start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def quiet_ports(count: int) -> list[int]:
    """Ports that nothing listens on, below those that the system gives to whoever connects or asks for any port."""
    end = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32_768
    candidates = random.SystemRandom().sample(range(min(10_000, end // 2), end), 1000)
    found: list[int] = []
    for port in candidates:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"{len(found)} of {count} ports are free")
