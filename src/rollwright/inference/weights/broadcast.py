"""Broadcast of weights to servers over a distributed group, in buckets. If a server is lost, the broadcast starts again with the others.

Invariants:

* a bucket is described to every server before its tensors are sent, and all tensors of a bucket have one type;
* memory holds only the bucket being sent, its flat copy, the next bucket, and one partly filled bucket for each further data type, so
  weights may come from an iterator that gathers them one by one;
* the group is formed again after a server was taken out or came back, because its ranks are numbered for the servers that formed it.
"""

from __future__ import annotations

import queue
import uuid
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from typing import Any

from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.backends.server_backend import BroadcastBackend
from rollwright.inference.network import find_free_ports, own_address
from rollwright.inference.router import Server
from rollwright.inference.server_set import ServerSet
from rollwright.inference.weights.group import Bucket, GroupPlace, SendingHalf, buckets
from rollwright.inference.weights.server_weights import ServerWeights
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.tracking.logging import getLogger

logger = getLogger("Broadcast")

#: Seconds in which the trainer notices servers that reject the request to join, before it joins the group and waits for their ranks.
_REFUSAL_SECONDS = 0.5


class WeightBroadcast:
    """The trainer's side of broadcasts to a set of servers; keeps their group between publications."""

    def __init__(self, backend: BroadcastBackend, servers: ServerSet, weights: ServerWeights) -> None:
        """Args:
        backend: the servers' protocol.
        servers: the servers.
        weights: applies the updates.
        """
        self.backend = backend
        self.servers = servers
        self.weights = weights
        self.group: SendingHalf | None = None
        self._members: tuple[Any, ...] = ()  # what the group was formed with

    def send(self, named: WeightStream, version: int, meta: WeightUpdateMeta) -> list[str]:
        """Send weights to every server.

        Args:
            named: distinct tensors; read a second time if a server is lost during the broadcast.
            version: version of these weights.
            meta: gives the allocation (the number of ranks of a server), backend, group name and bucket size.

        Returns:
            Addresses of the servers that confirmed.

        Raises:
            WeightUpdateError: no server took the weights.
        """
        try:
            return self._send(named, version, meta)
        except WeightUpdateError as error:  # a server that is lost takes the whole group with it
            logger.warning(
                "The broadcast of version %d failed, and begins again with the servers that answer: %s", version, error
            )
        return self.weights.retry_lost(version, lambda: self._send(named, version, meta))

    def _send(self, named: WeightStream, version: int, meta: WeightUpdateMeta) -> list[str]:
        servers = self.weights.answering_servers()
        if not servers and self.weights.others_sample_on:
            return []
        if not servers:
            raise WeightUpdateError(f"No {self.backend.kind} server took version {version}: {self.servers.router.describe()}.")
        group = self._joined(servers, meta)
        announced = {server.address: queue.SimpleQueue[Bucket | None]() for server in servers}

        def update(server: Server) -> None:
            self.backend.begin_receiving(server, version)
            while (bucket := announced[server.address].get()) is not None:
                self.backend.receive_bucket(server, group.name, bucket, version)
                if bucket.is_last:
                    break
            else:
                raise WeightUpdateError(f"The broadcast of version {version} ended before its last bucket.")
            self.backend.end_receiving(server, version)
            self.weights.confirm(server, version)

        def send() -> None:
            upcoming = buckets(named, meta.bucket_bytes, of_one_type=True)
            bucket = next(upcoming, None)
            try:
                if bucket is None:
                    raise WeightUpdateError("There are no weights to send.")
                while bucket is not None:
                    following = next(upcoming, None)
                    described = Bucket.of(bucket, is_last=following is None)
                    for each in announced.values():
                        each.put(described)
                    group.send(bucket)
                    bucket = following
            except BaseException:
                for each in announced.values():
                    each.put(None)
                self.leave()  # so that the others do not wait for tensors that will not come
                raise

        try:
            return self.weights.apply_update(version, update, restore=None, servers=servers, alongside=send)
        except WeightUpdateError:
            self.leave()
            raise

    def _joined(self, servers: list[Server], meta: WeightUpdateMeta) -> SendingHalf:
        """Return the group with ``servers``, formed again if a server was taken out or came back since."""
        members = (tuple(server.address for server in servers), self.servers.router.changes, meta.group)
        if self.group is not None and self._members == members:
            return self.group
        ranks = [self.backend.ranks_of(server, meta) for server in servers]
        backend = self.backend.group_backend(servers, meta)
        self.leave()
        (port,) = find_free_ports(1)
        trainer = GroupPlace(
            own_address(server.url for server in servers),
            port,
            0,
            1 + sum(ranks),
            f"{meta.group}-{uuid.uuid4().hex[:8]}",  # SGLang allows a name once, and keeps the group of a dead trainer
            backend,
            self.backend.invitation(),
        )
        joining = [
            self.servers.submit(self.backend.join_group, server, replace(trainer, rank_offset=1 + sum(ranks[:index])))
            for index, server in enumerate(servers)
        ]
        try:
            # Servers that refuse at once are noticed before this rank waits for them.
            _raise_first(wait(joining, timeout=_REFUSAL_SECONDS, return_when=FIRST_EXCEPTION).done)
            try:
                self.group = self.backend.sending_half(trainer)
            except WeightUpdateError:
                _raise_first(future for future in joining if future.done())  # why a rank did not join
                raise
            _raise_first(joining)
        except EngineError as error:
            self.leave()
            message = f"The group of the trainer and its servers could not be formed: {error}"
            raise self.weights.failure(message, dict.fromkeys(servers, error)) from error
        self._members = members
        return self.group

    def leave(self) -> None:
        """Leave the group with the servers, if there is one."""
        group, self.group = self.group, None
        if group is None:
            return
        group.close()
        if self.servers.is_open:
            for server in self.servers.router.in_service():
                self.servers.submit(self.backend.forget_group, server, group.name)


def _raise_first(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        future.result()
