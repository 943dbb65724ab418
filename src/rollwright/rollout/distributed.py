"""The rollout engine of a run whose episodes run in other processes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.processes.supervisor import Process
from rollwright.rollout.engines import RemoteEngine
from rollwright.rollout.workers import RolloutWorkers


class DistributedRolloutEngine(RemoteEngine):
    """A rollout engine that schedules episodes in this process and has workers run them.

    Args:
        config: the ``rollout`` section.
        client: of the servers; it pauses and resumes them, and follows what the first rank publishes.
        pool: the workers.
        publisher: returns what the first rank has published (``ServerWeights.publisher``).
        seed: of the run.

    Attributes:
        grow: called when the first servers and workers run; places those that may join later, and returns them.
    """

    grow: Callable[[], tuple[list[Process], list[Process]]] | None = None

    def __init__(
        self,
        config: RolloutConfig,
        client: RemoteInferenceEngine,
        pool: RolloutWorkers,
        *,
        publisher: Callable[[], tuple[int, Collection[str]]],
        seed: int,
    ) -> None:
        super().__init__(config, client=client, seed=seed)
        self.workers = self.pool = pool
        self._publisher = publisher
        self._workers_run = False

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """See ``RolloutEngine.initialize``; returns when the workers run."""
        super().initialize(*args, **kwargs)
        self._servers.weights.publisher = self._publisher
        self.pool.wait_started()
        self._workers_run = True
        self.pool.release(*self.in_service())
        servers, workers = ([], []) if self.grow is None else self.grow()
        for process in workers:
            self.pool.add(process)
        if self.watch is not None:
            for process in servers:
                self.watch.add(process)

    def destroy(self) -> None:
        """See ``RolloutEngine.destroy``. The processes are ended by whoever placed them."""
        self.pool.close()
        super().destroy()

    def pause(self) -> None:
        """See ``RolloutEngine.pause``. Workers send no requests, either."""
        self.pool.hold()
        super().pause()

    def resume(self) -> None:
        """See ``RolloutEngine.resume``. The version becomes that of the servers, because a rank may have published."""
        if self._pauses == 1:
            self._servers.weights.adopt_version()
        super().resume()
        if not self._pauses:
            self.pool.release(*self.in_service())

    def set_version(self, version: int) -> None:
        """See ``RolloutEngine.set_version``."""
        is_new = version != self._servers.get_version()
        if is_new and not self._pauses:
            self._servers.weights.adopt_version()
        super().set_version(version)
        if is_new and not self._pauses:
            self.pool.release(*self.in_service())

    def in_service(self) -> tuple[list[str], int]:
        """See ``RemoteEngine``; empty until the workers run, because they are the ones notified."""
        return super().in_service() if self._workers_run else ([], 0)
