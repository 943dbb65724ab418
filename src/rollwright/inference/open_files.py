"""How many connections a process may have open: each is a file to the system, and the usual limit is 1024."""

from __future__ import annotations

import contextlib
import resource

_WANTED = 65_536
#: For everything else that a process opens.
_RESERVED = 192


def allow_many_connections() -> int:
    """Raise this process's limit of open files as far as the system lets it.

    Returns:
        How many connections may be open at once; those beyond wait, as one that the system refuses looks like a server that
        is gone.
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
