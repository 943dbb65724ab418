"""Network basics: free ports, addresses of running servers, and the number of connections that a process may open."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from urllib.parse import urlsplit

from rollwright.errors import ConfigError

#: Environment variables with comma-separated ``host:port`` of inference servers; the first that is set counts.
ADDRESS_VARIABLES = ("ROLLWRIGHT_LLM_SERVER_ADDRS", "AREAL_LLM_SERVER_ADDRS")
#: Number of open files to request for this process. Each connection is one, and the usual limit is 1024.
_WANTED = 65_536
#: Number of open files to keep for other uses than connections.
_RESERVED = 192


def find_free_ports(count: int, port_range: tuple[int, int] | None = None, exclude: Iterable[int] = ()) -> list[int]:
    """Find distinct ports that nothing listens on.

    All of them stay bound until the last is found, so one call never returns a port twice. Another process may take a port before the
    server binds it; a launcher then starts the server on another port.

    Args:
        count: number of ports.
        port_range: first and last port to consider. None leaves the choice to the system.
        exclude: ports to skip.

    Raises:
        ConfigError: the range has too few free ports.
    """
    unwanted, ports = set(exclude), list[int]()
    with ExitStack() as held:
        for wanted in range(port_range[0], port_range[1] + 1) if port_range else itertools.repeat(0):
            if len(ports) == count:
                break
            listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                listener.bind(("", wanted))
                ports += {listener.getsockname()[1]} - unwanted
    if len(ports) < count:
        raise ConfigError(f"Only {len(ports)} of {count} ports are free in {port_range}: give a wider port_range.")
    return ports


def parse_addresses(text: str) -> list[str]:
    """Split a comma-separated list of addresses, dropping blanks and duplicates."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def server_url(address: str) -> str:
    """Return the base URL for ``host:port`` or an http(s) URL, without a trailing slash.

    Raises:
        ConfigError: the port is missing or invalid.
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
    """Return the addresses of running inference servers, as configured or else from the environment.

    Returns:
        ``host:port`` (or URLs) in order, without duplicates; empty if there are none.

    Raises:
        ConfigError: an address is malformed.
    """
    announced = (parse_addresses(os.environ.get(variable, "")) for variable in ADDRESS_VARIABLES)
    addresses = list(dict.fromkeys(configured)) or next(filter(None, announced), [])
    for address in addresses:
        server_url(address)
    return addresses


def is_loopback(url: str) -> bool:
    """True if ``url`` names this host by its loopback interface."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def own_address(peers: Iterable[str]) -> str:
    """Return the address at which ``peers`` reach this host: loopback if all peers are on this host.

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


def allow_many_connections() -> int:
    """Raise this process's limit of open files as far as the system allows.

    Returns:
        Number of connections that may be open at once. Further connections must wait, because one that the system refuses
        looks like a lost server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS refuses some values below its own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY:
        return _WANTED
    return max(16, soft - max(_RESERVED, soft // 8))
