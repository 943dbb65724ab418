"""Ports and addresses: free ones, and those of servers that run already."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from urllib.parse import urlsplit

from rollwright.errors import ConfigError

#: Environment variables that hold comma-separated ``host:port`` of inference servers; the first that is set counts.
ADDRESS_VARIABLES = ("ROLLWRIGHT_LLM_SERVER_ADDRS", "AREAL_LLM_SERVER_ADDRS")


def find_free_ports(count: int, port_range: tuple[int, int] | None = None, exclude: Iterable[int] = ()) -> list[int]:
    """Ports that nothing listens on now, all different.

    All of them are held open until the last is found, so one call never gives the same port twice. Between this call and
    the server's bind another process may take one; a launcher starts the server again on another port then.

    Args:
        count: how many.
        port_range: first and last port to consider; None: any that the system hands out.
        exclude: ports that are not given.

    Returns:
        ``count`` ports.

    Raises:
        ConfigError: the range has too few free ports.
    """
    unwanted = set(exclude)
    ports: list[int] = []
    with ExitStack() as held:
        candidates = iter(range(port_range[0], port_range[1] + 1)) if port_range else None
        while len(ports) < count:
            wanted = 0 if candidates is None else next(candidates, None)
            if wanted is None:
                raise ConfigError(f"Only {len(ports)} of {count} ports are free in {port_range}: give a wider port_range.")
            listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                listener.bind(("", wanted))
            except OSError:
                continue
            port = listener.getsockname()[1]
            if port not in unwanted:
                ports.append(port)
    return ports


def parse_addresses(text: str) -> list[str]:
    """The addresses of a comma-separated list, with blanks and duplicates left out."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def server_url(address: str) -> str:
    """The base URL of ``host:port`` or of an http(s) URL, without a trailing slash.

    Raises:
        ConfigError: there is no port, or it is not one.
    """
    address = address.strip()
    if address.startswith(("http://", "https://")):
        return address.rstrip("/")
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ConfigError(f"Server address {address!r} is not host:port; write for example 127.0.0.1:30000.")
    if not 0 < int(port) <= 65535:
        raise ConfigError(f"Server address {address!r} has port {port}; ports are 1 to 65535.")
    return f"http://{address}"


def find_server_addresses(configured: Iterable[str] = ()) -> list[str]:
    """Addresses of running inference servers: those configured, else those in the environment, else none.

    Returns:
        ``host:port`` (or URLs) in order, without duplicates; empty where no server is announced.

    Raises:
        ConfigError: an address is malformed.
    """
    addresses = list(dict.fromkeys(configured))
    for variable in ADDRESS_VARIABLES:
        if addresses:
            break
        addresses = parse_addresses(os.environ.get(variable, ""))
    for address in addresses:
        server_url(address)
    return addresses


def is_loopback(url: str) -> bool:
    """True where ``url`` names this host by its loopback interface."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def own_address(peers: Iterable[str]) -> str:
    """The address by which ``peers`` reach this host: loopback where they are all on it.

    Args:
        peers: URLs of servers.
    """
    for url in peers:
        if is_loopback(url):
            continue
        parts = urlsplit(url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
            probe.connect((parts.hostname or "", parts.port or 80))
            return probe.getsockname()[0]
    return "127.0.0.1"
