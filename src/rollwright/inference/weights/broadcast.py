"""Weights broadcast to servers over a distributed group: bucket by bucket, and begun again with the rest when a server goes.

Invariants:

* a bucket is described to every server before its tensors are sent, and all of a bucket's tensors have one type;
* at a time there are the bucket that is sent and its flat copy, the next one, and one that fills for each further type of tensors;
  so weights may come from an iterator that gathers them one by one;
* a group is formed again whenever a server was taken out or came back: its ranks are numbered for the servers it was formed with.
"""

from __future__ import annotations

import queue
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from rollwright.config.sections import RolloutConfig
from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.network import find_free_ports, own_address
from rollwright.inference.router import Server
from rollwright.inference.weights.group import buckets
from rollwright.inference.weights.publication import RemoteClient
from rollwright.inference.weights.ways import WeightUpdateMeta
from rollwright.tracking.logging import getLogger

logger = getLogger("Broadcast")

#: How long servers that are asked to join are listened to before the trainer waits for them at the meeting point.
_REFUSAL_SECONDS = 0.5


@dataclass(frozen=True)
class GroupPlace:
    """Where a group meets, and the place in it of a server's first rank, in SGLang's names.

    The ``invitation`` is what a server needs of the sending half besides, where that has something to give.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    invitation: str = ""


@dataclass(frozen=True)
class Bucket:
    """What a server is told of a bucket before its tensors come."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    is_last: bool

    @classmethod
    def of(cls, named: Sequence[tuple[str, Tensor]], is_last: bool) -> Bucket:
        """The description of tensors."""
        names, tensors = zip(*named, strict=True)
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        return cls(list(names), dtypes, [list(tensor.shape) for tensor in tensors], is_last)


class SendingHalf(Protocol):
    """The trainer's place in a group, rank 0; servers have the others."""

    name: str

    def send(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Send a bucket's tensors to every other rank.

        Raises:
            WeightUpdateError: a rank is gone.
        """
        ...

    def close(self) -> None:
        """Leave the group, so that ranks that wait for this one hear of it."""
        ...


class BroadcastClient(RemoteClient):
    """A client of servers that also take weights by ``xccl``."""

    ways = ("shared", "disk", "xccl")

    @abstractmethod
    def ranks_of(self, server: Server, meta: WeightUpdateMeta) -> int:
        """How many ranks of a group are a server's."""

    @abstractmethod
    def group_backend(self, servers: list[Server], meta: WeightUpdateMeta) -> str:
        """``nccl`` or ``gloo``: what ``meta`` says, else what the servers' devices want."""

    def invitation(self) -> str:
        """What servers are given to find the sending half of a new group, besides its address."""
        return ""

    @abstractmethod
    def sending_half(self, place: GroupPlace) -> SendingHalf:
        """Form the group as rank 0; returns when all ranks are there."""

    @abstractmethod
    def join_group(self, server: Server, place: GroupPlace) -> None:
        """Have a server's ranks join; returns when the group is formed."""

    def begin_receiving(self, server: Server, version: int) -> None:
        """Get a server ready for buckets."""

    @abstractmethod
    def receive_bucket(self, server: Server, group_name: str, bucket: Bucket, version: int) -> None:
        """Have a server receive a bucket; returns when it has loaded it."""

    def end_receiving(self, server: Server, version: int) -> None:
        """All buckets have come."""

    def forget_group(self, server: Server, name: str) -> None:
        """Have a server leave a group, where it can be asked without waiting for ranks that are gone."""

    def __init__(self, config: RolloutConfig | None = None, *, addresses: Iterable[str] | None = None) -> None:
        super().__init__(config, addresses=addresses)
        self._group: SendingHalf | None = None
        self._group_members: tuple[Any, ...] = ()

    def destroy(self) -> None:
        """See ``RemoteClient.destroy``; the group with the servers is left."""
        super().destroy()
        self._leave_group()

    def broadcast_weights(self, named: Iterable[tuple[str, Tensor]], version: int, meta: WeightUpdateMeta) -> list[str]:
        """Send weights to every server over a distributed group, bucket by bucket.

        Args:
            named: distinct tensors; iterated a second time where a server went in the middle.
            version: of these weights.
            meta: allocation (how many ranks a server has), backend, group name and bucket size.

        Returns:
            Addresses of the servers that confirmed.

        Raises:
            WeightUpdateError: no server took the weights.
        """
        try:
            return self._broadcast(named, version, meta)
        except WeightUpdateError as error:  # a server that goes in the middle takes the whole group with it
            logger.warning(
                "The broadcast of version %d failed, and begins again with the servers that answer: %s", version, error
            )
            return self._broadcast(named, version, meta)

    def _broadcast(self, named: Iterable[tuple[str, Tensor]], version: int, meta: WeightUpdateMeta) -> list[str]:
        servers = self.answering_servers()
        if not servers:
            raise WeightUpdateError(f"No {self.kind} server took version {version}: {self.router.describe()}.")
        group = self._joined(servers, meta)
        told = {server.address: queue.SimpleQueue[Bucket | None]() for server in servers}

        def update(server: Server) -> None:
            self.begin_receiving(server, version)
            while (bucket := told[server.address].get()) is not None:
                self.receive_bucket(server, group.name, bucket, version)
                if bucket.is_last:
                    break
            else:
                raise WeightUpdateError(f"The broadcast of version {version} ended before its last bucket.")
            self.end_receiving(server, version)
            self.confirm(server, version)

        def send() -> None:
            upcoming = buckets(named, meta.bucket_bytes, of_one_type=True)
            bucket = next(upcoming, None)
            try:
                if bucket is None:
                    raise WeightUpdateError("There are no weights to send.")
                while bucket is not None:
                    following = next(upcoming, None)
                    described = Bucket.of(bucket, is_last=following is None)
                    for each in told.values():
                        each.put(described)
                    group.send(bucket)
                    bucket = following
            except BaseException:
                for each in told.values():
                    each.put(None)
                self._leave_group()  # so that the others do not wait for what will not come
                raise

        try:
            return self.apply_update(version, update, restore=None, servers=servers, alongside=send)
        except WeightUpdateError:
            self._leave_group()
            raise

    def _joined(self, servers: list[Server], meta: WeightUpdateMeta) -> SendingHalf:
        """The group with ``servers``; formed again where one was taken out or came back since."""
        members = (tuple(server.address for server in servers), self.router.changes, meta.group)
        if self._group is not None and self._group_members == members:
            return self._group
        ranks = [self.ranks_of(server, meta) for server in servers]
        backend = self.group_backend(servers, meta)
        self._leave_group()
        (port,) = find_free_ports(1)
        trainer = GroupPlace(
            own_address(server.url for server in servers),
            port,
            0,
            1 + sum(ranks),
            f"{meta.group}-{uuid.uuid4().hex[:8]}",  # SGLang forms no second group of one name, nor forgets that of a dead trainer
            backend,
            self.invitation(),
        )
        joining = [
            self.submit(self.join_group, server, GroupPlace(**{**asdict(trainer), "rank_offset": 1 + sum(ranks[:index])}))
            for index, server in enumerate(servers)
        ]
        try:
            # A server that refuses at once is heard before this rank waits for it.
            _raise_first(wait(joining, timeout=_REFUSAL_SECONDS, return_when=FIRST_EXCEPTION).done)
            try:
                self._group = self.sending_half(trainer)
            except WeightUpdateError:
                _raise_first(future for future in joining if future.done())  # why a rank did not come
                raise
            _raise_first(joining)
        except EngineError as error:
            self._leave_group()
            raise WeightUpdateError(f"The group of the trainer and its servers could not be formed: {error}") from error
        self._group_members = members
        return self._group

    def _leave_group(self) -> None:
        """Leave the group with the servers, where there is one."""
        group, self._group = self._group, None
        if group is None:
            return
        group.close()
        if self._threads is not None:
            for server in self.router.in_service():
                self.submit(self.forget_group, server, group.name)


def _raise_first(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        future.result()
