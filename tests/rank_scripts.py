"""Scripts that run in one process or in several ranks over Gloo, as forks of the warm process (``warm.py``)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from quiet_ports import quiet_ports
from warm import WarmProcess, shared_warm

#: Seconds that all ranks get together, on a machine that is busy with other things.
LIMIT = 500.0


class RankScript:
    """A script that runs; ``wait`` ends it.

    Args:
        script: file of the script.
        arguments: of the script.
        count: ranks; one runs as if there were no ranks.
        env: variables of all ranks, in addition to those of this process.
    """

    def __init__(self, script: Path, *arguments: object, count: int, env: dict[str, str] | None = None) -> None:
        common = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        if count > 1:
            (port,) = quiet_ports(1)
            common |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._logs = [script.parent / f"{script.stem}-{count}-{rank}.log" for rank in range(count)]
        self._ranks: list[WarmProcess] = []
        for rank, log in enumerate(self._logs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
            self._ranks.append(
                shared_warm().start_script(script, list(map(str, arguments)), script.parent, log, common | place)
            )

    def wait(self) -> None:
        """Wait until every rank has ended, and assert that each ended well."""
        try:
            statuses = [rank.wait(LIMIT) for rank in self._ranks]
        finally:
            for rank in self._ranks:
                with contextlib.suppress(ProcessLookupError):
                    rank.kill()
        told = "\n----\n".join(log.read_text()[-3000:] for log in self._logs)
        assert statuses == [0] * len(self._ranks), told


def run_ranks(script: Path, *arguments: object, count: int, env: dict[str, str] | None = None) -> None:
    """Run a script to its end; see ``RankScript``."""
    RankScript(script, *arguments, count=count, env=env).wait()
