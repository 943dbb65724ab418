"""The adapters that the servers of an engine hold: which one new requests name, and when old ones are unloaded.

Invariants:

* every publication has a name of its own, also a second one of the same version, because servers key their prefix caches by name;
* a request ends with the adapter that it began with: an adapter is loaded before requests name it, and unloaded only when no request of
  this engine uses it and ``count`` newer ones exist;
* unloading never delays a publication. Some servers let it wait for the requests that use the adapter, so that a publisher that unloads
  first waits for ever while its requests wait for the publisher;
* adapters whose names begin otherwise than this run's are never touched.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.backends.server_backend import ServerBackend
from rollwright.inference.request import ModelRequest
from rollwright.inference.router import Server
from rollwright.inference.server_set import ServerSet
from rollwright.inference.weights.adapter import AdapterRoom, version_name
from rollwright.inference.weights.files import write_weights
from rollwright.inference.weights.stream import WeightStream
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteWeights")

#: Seconds that the servers have to unload the adapters of an engine that is being closed.
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class PublishedAdapter:
    """A published adapter.

    Attributes:
        name: the name under which servers hold it.
        version: the version that its tokens carry.
        directory: its PEFT directory; None if another process published it.
    """

    name: str
    version: int
    directory: Path | None = None


class ServerAdapters:
    """Names, loads and unloads the adapters of one engine.

    Attributes:
        room: what the servers hold for this run.
        are_used: True if this engine publishes, or follows a publisher of, adapters. Its servers are then never paused, because a
            publication leaves what they compute with as it is.
        current: the adapter that new requests name. None before the first publication: they are sampled with the base, whose version
            is 0 (B is zero).
        base_label: the servers' own label of the base's version.
    """

    def __init__(self, backend: ServerBackend, servers: ServerSet, room: AdapterRoom | None) -> None:
        """Args:
        backend: the servers' protocol.
        servers: the servers.
        room: None for an engine of which it is not known whether an adapter will be published to it.
        """
        self.backend = backend
        self.servers = servers
        self.room = room or AdapterRoom(count=servers.config.max_head_offpolicyness + 1)
        self.are_used = self._is_named = room is not None
        self.current: PublishedAdapter | None = None
        self.base_label = 0
        self._kept: list[PublishedAdapter] = []  # oldest first; the last is the current one
        self._on_disk: list[Path] = []  # oldest first; a server may read an adapter again while a request uses it
        self._uses: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._series, self._newest = "", -1
        self._written: set[str] = set()  # every name that this engine has given
        self._unloading = ThreadPoolExecutor(2, thread_name_prefix=f"{servers.kind}-unload")

    # -- requests ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def bound(self, request: ModelRequest) -> Iterator[tuple[ModelRequest, int | None]]:
        """Keep an adapter for the duration of the block.

        Yields:
            The request with the name of the current adapter and the version of its tokens. A request that names an adapter itself, or
            is sampled with the base, is unchanged, and its tokens have the version that the server reports (None).
        """
        with self._lock:
            adapter = self.current if request.lora_name is None else None
            if adapter is not None:
                self._uses[adapter.name] += 1
        if adapter is None:
            yield request, None
            return
        try:
            named = copy.copy(request)
            named.lora_name = adapter.name
            yield named, adapter.version
        finally:
            with self._lock:
                self._uses[adapter.name] -= 1

    def versions(self, reported: list[int], version: int) -> list[int]:
        """Return the versions of the tokens of a request that named an adapter.

        Args:
            reported: what the server reports: the version of the base, or of the adapter.
            version: the adapter's version.

        Raises:
            EngineError: the base is not the one that the adapter was trained on, because something else changed the server's weights.
        """
        if changed := sorted(set(reported) - {self.base_label, version}):
            raise EngineError(
                f"A {self.backend.kind} server sampled with adapter version {version} on base version {changed[0]}, but the adapter "
                f"belongs to base version {self.base_label}: something else changed the server's weights. Restart the server."
            )
        return [version] * len(reported)

    # -- publication ---------------------------------------------------------------------------------------------------

    def connect(self, labels: dict[str, int]) -> None:
        """Learn from servers that have just been connected which base they hold, and the name of this run if they know it.

        Args:
            labels: label of the weights of each server. A server that knows this run by its key gives the version of the run's newest
                adapter instead, which an earlier process left there; it is set to 0.

        Raises:
            WeightUpdateError: the key belongs to different runs on different servers.
        """
        runs = {address: self.backend.facts[address].run for address in labels if address in self.backend.facts}
        named = {run for run in runs.values() if run is not None}
        if len(named) > 1:
            raise WeightUpdateError(
                f"The key in rollout.api_key belongs to different runs on the {self.backend.kind} servers ({runs}): start them with "
                "the same --run-key."
            )
        for run in named:
            self.room, self._is_named = dataclasses.replace(self.room, run=run), True
        labels.update({address: 0 for address, run in runs.items() if run is not None})
        self.base_label = max(labels.values(), default=0)

    def begin(self, version: int) -> None:
        """Prepare the first publication of an engine of which it was not known that adapters would be published to it.

        Args:
            version: the label of the servers' weights.
        """
        if not self.are_used:
            self.are_used = True
            self.connect({server.address: version for server in self.servers.router.in_service()})

    def write(self, root: Path, weights: WeightStream, version: int) -> PublishedAdapter:
        """Write an adapter as a PEFT directory below ``root``, under a name that no other publication has."""
        if version <= self._newest or not self._series:  # the first one, the same version again, or a run that went back
            self._series = f"{time.time_ns() // 1_000_000:011x}{uuid.uuid4().hex[:4]}"
            self._remove_abandoned(root)
        self._newest = version
        name = version_name(version, f"{self.room.run}-{self._series}")
        write_weights(root / name, weights, version)
        self._on_disk.append(root / name)
        self._written.add(name)
        return PublishedAdapter(name, version, root / name)

    def load(self, server: Server, adapter: PublishedAdapter) -> None:
        """Load an adapter on one server and check that the server lists it."""
        try:
            self.backend.load_adapter(server, adapter.name, str(adapter.directory))
        except WeightUpdateError:  # a call whose answer was lost may have been carried out
            if adapter.name not in self.backend.loaded_adapters(server):
                raise
        if adapter.name not in self.backend.loaded_adapters(server):
            raise WeightUpdateError(
                f"The {self.backend.kind} server at {server.address} accepted adapter {adapter.name} and does not list it."
            )

    def restore(self, server: Server) -> None:
        """Load the kept adapters that a server lacks, for example because it was restarted, and unload what it missed to unload.

        No publication may run meanwhile.
        """
        held, kept = set(self.backend.loaded_adapters(server)), {each.name for each in self._kept}
        for adapter in self._kept:
            if adapter.directory is not None and adapter.name not in held:
                self.load(server, adapter)
        self._unloading.submit(self._unload, server, sorted((held & self._written) - kept))

    def published(self, adapter: PublishedAdapter) -> None:
        """Let new requests name ``adapter``, and start to unload those that are no longer needed."""
        with self._lock:
            self._kept.append(adapter)
            self.current = adapter
            newest = self._kept[-self.room.count :]
            kept = [each for each in self._kept if each in newest or self._uses[each.name]]
            dropped = [each.name for each in self._kept if each not in kept]
            self._kept = kept
            self._uses += Counter()  # forget the names with no uses
        files, self._on_disk = self._on_disk, self._on_disk[-self.room.loaded :]
        for directory in files[: len(files) - len(self._on_disk)]:
            if all(each.directory != directory for each in kept):
                shutil.rmtree(directory, ignore_errors=True)
        for server in self.servers.router.in_service():
            self._unloading.submit(self._unload, server, dropped)

    def _unload(self, server: Server, names: list[str]) -> None:
        """Unload adapters, and what earlier processes of this run left if the run has a name that no other run has."""
        abandoned: list[str] = []
        if self._is_named:
            with contextlib.suppress(EngineError):
                held = self.backend.loaded_adapters(server)
                abandoned = [name for name in held if self._is_own(name) and name not in self._written]
        for name in names + abandoned:
            try:
                self.backend.unload_adapter(server, name)
            except EngineError as error:
                logger.warning("The server at %s keeps adapter %s: %s", server.address, name, error)

    def _is_own(self, name: str, version: int | None = None) -> bool:
        number = r"\d+" if version is None else str(version)
        return re.fullmatch(version_pattern(self.room.run, number), name) is not None

    def _remove_abandoned(self, root: Path) -> None:
        """Remove the directories that an earlier process of this run left."""
        mine = {*self._on_disk}
        for path in root.glob(f"{self.room.run}-*"):
            if self._is_named and path not in mine and self._is_own(path.name):
                shutil.rmtree(path, ignore_errors=True)

    # -- another engine publishes --------------------------------------------------------------------------------------

    def holds(self, server: Server, version: int) -> bool:
        """Return True if a server can sample with a version that another engine published; new requests then name it.

        Version 0 is the base if no adapter was published as version 0.
        """
        found = max((name for name in self.backend.loaded_adapters(server) if self._is_own(name, version)), default=None)
        if found is None:
            if version == 0:
                self.current = None
            return version == 0
        if self.current is None or self.current.name != found:
            self.current = PublishedAdapter(found, version)
        return True

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Unload what this engine published from servers that go on without it. Idempotent."""
        own = [each.name for each in self._kept if each.directory is not None]
        self._kept, self.current = [], None
        if own and self.servers.is_open and not self.servers.launched:
            ends: list[Future[None]] = [
                self._unloading.submit(self._unload, server, own) for server in self.servers.router.in_service()
            ]
            deadline = time.monotonic() + _CLOSE_SECONDS
            for end in ends:
                with contextlib.suppress(TimeoutError):
                    end.result(max(0.0, deadline - time.monotonic()))
        self._unloading.shutdown(wait=False, cancel_futures=True)


def version_pattern(run: str, number: str) -> str:
    """Return a regular expression for the names of a run's adapters; see ``ServerAdapters.write``."""
    return f"{re.escape(run)}-[0-9a-f]{{15}}-v{number}"
