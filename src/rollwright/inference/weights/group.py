"""A process group of the trainer's first rank and the inference servers, over which weights are broadcast.

The group is independent of the default group of either side: neither has to have one, and a server may be in several.
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented names

from rollwright.errors import WeightUpdateError

DEFAULT_GROUP = "weight_update_group"
#: Size of a bucket: large enough that bandwidth dominates a broadcast, small enough to fit beside the weights.
BUCKET_BYTES = 512 << 20
_LOOK_SECONDS = 0.0005
_ABORT_SECONDS = 10.0
_ASK_SECONDS = 120.0  # for another interpreter to import torch


@dataclass(frozen=True)
class GroupPlace:
    """Address and size of a group, and the rank of a server's first process in it, under SGLang's names.

    ``invitation`` holds what a server needs from the sender besides the address; empty if nothing.
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
    """Description of a bucket of tensors, which a server gets before the tensors."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    is_last: bool

    @classmethod
    def of(cls, named: Sequence[tuple[str, Tensor]], is_last: bool) -> Bucket:
        """Describe tensors."""
        names, tensors = zip(*named, strict=True)
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        return cls(list(names), dtypes, [list(tensor.shape) for tensor in tensors], is_last)


class SendingHalf(Protocol):
    """The trainer's side of a group, rank 0. The servers have the other ranks."""

    name: str

    def send(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Send a bucket's tensors to every other rank.

        Raises:
            WeightUpdateError: a rank is gone.
        """
        ...

    def close(self) -> None:
        """Leave the group, so that ranks waiting for this one notice."""
        ...


class WeightGroup:
    """A process group in which rank 0 sends and the other ranks receive.

    Gloo works on CPU tensors and NCCL on GPU tensors. SGLang joins a group through torch's own helper over a store that already has a
    prefix, so a rank's keys have three prefixes: the group's name, the helper's ``name/``, and the device. Our keys must have
    them, too, or both sides wait for each other until they time out.
    """

    def __init__(
        self, master_address: str, master_port: int, rank: int, world_size: int, name: str, backend: str, timeout: float = 120.0
    ) -> None:
        """Args:
        master_address, master_port: address that rank 0 listens on.
        rank: rank of this process.
        world_size, name: size and name of the group.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: seconds to wait for a rank that does not join, or for the end of a broadcast.

        Raises:
            WeightUpdateError: the group could not be formed.
        """
        if backend not in ("gloo", "nccl"):
            raise WeightUpdateError(f"There is no backend {backend!r} for weight updates; use gloo or nccl.")
        if backend == "nccl" and not torch.cuda.is_available():
            raise WeightUpdateError("The nccl backend needs a GPU on both sides; use gloo.")
        if backend == "nccl":
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as in SGLang's ranks; NCCL reads it at its first use
        limit = timedelta(seconds=timeout)
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        try:
            self._store: Any = TCPStore(master_address, master_port, world_size, rank == 0, limit)
            store = self._store
            for prefix in (name, f"{name}/", f"{self.device.type}/"):
                store = PrefixStore(prefix, store)
            self._group: Any = None
            if backend == "gloo":
                self._group = dist.ProcessGroupGloo(store, rank, world_size, limit)
            else:
                options = dist.ProcessGroupNCCL.Options()
                # NCCL's watchdog ends the process after its own limit. ``broadcast`` keeps the limit instead, and reports who is gone.
                options._timeout = timedelta(days=7)
                self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        except (RuntimeError, dist.DistError) as error:
            raise WeightUpdateError(
                f"Rank {rank} of {world_size} could not join the group {name!r} at {master_address}:{master_port} within "
                f"{timeout:g} s: {error}"
            ) from error
        self.rank, self.world_size, self.name, self._timeout = rank, world_size, name, timeout

    def broadcast(self, tensor: Tensor) -> None:
        """Send ``tensor`` from rank 0 to the tensors of all other ranks.

        Raises:
            WeightUpdateError: a rank is gone, or did not take part within the time limit; the group is then left.
        """
        if self._group is None:
            raise WeightUpdateError(f"The group {self.name!r} was left; form another.")
        # In a thread that may be left behind: NCCL waits for ranks that are gone, without a limit while it connects.
        sent: Future[None] = Future()
        threading.Thread(target=_broadcast, args=(self._group, tensor, sent), name="rollwright-broadcast", daemon=True).start()
        try:
            sent.result(self._timeout)
        except TimeoutError:
            self.close()
            raise WeightUpdateError(
                f"A broadcast in the group {self.name!r} did not end within {self._timeout:g} s (rollout.weight_update_timeout): a rank "
                "is gone or hangs; look at the servers' logs."
            ) from None
        except RuntimeError as error:
            raise WeightUpdateError(f"A broadcast in the group {self.name!r} failed: {error}") from error

    def close(self) -> None:
        """Leave the group and close its connections, so that ranks waiting for this one notice."""
        group, self._group, self._store = self._group, None, None
        if group is not None and self.device.type == "cuda":
            # In a thread that may be left behind: it may wait for what hangs.
            abort = threading.Thread(target=group.abort, name="rollwright-abort", daemon=True)
            abort.start()
            abort.join(_ABORT_SECONDS)

    def send(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Broadcast the tensors of a bucket, which must have one type, as one flat tensor. Only rank 0 calls it."""
        self.broadcast(torch.cat([tensor.detach().to(self.device).reshape(-1) for _, tensor in named]))

    def receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, flat: bool = False
    ) -> list[tuple[str, Tensor]]:
        """Receive tensors from rank 0, in the order in which it sends them.

        Args:
            names, dtypes, shapes: name, type and shape of each tensor.
            flat: the tensors arrive as one tensor (SGLang's ``flattened_bucket``) instead of one by one.

        Raises:
            WeightUpdateError: torch does not know a type, or a flat bucket is empty.
        """
        kinds = [_dtype(name, dtype) for name, dtype in zip(names, dtypes, strict=True)]
        if not flat:
            whole = [
                torch.empty(tuple(shape), dtype=kind, device=self.device) for kind, shape in zip(kinds, shapes, strict=True)
            ]
            for tensor in whole:
                self.broadcast(tensor)
            return list(zip(names, whole, strict=True))
        if not kinds:
            raise WeightUpdateError("A flattened bucket has no tensors: name some.")
        sizes = [math.prod(shape) for shape in shapes]
        # Tensors of several types are sent in the type that torch.cat promotes them to, as in SGLang's buckets.
        together = torch.empty(sum(sizes), dtype=functools.reduce(torch.promote_types, kinds), device=self.device)
        self.broadcast(together)
        parts = [part.view(tuple(shape)) for part, shape in zip(together.split(sizes), shapes, strict=True)]
        return [(name, part.to(kind)) for name, part, kind in zip(names, parts, kinds, strict=True)]


def _broadcast(group: Any, tensor: Tensor, sent: Future[None]) -> None:
    """Broadcast from rank 0, and wait until the tensor has arrived, on a GPU as well."""
    try:
        if tensor.is_cuda:
            torch.cuda.set_device(tensor.device)
        work = group.broadcast(tensor, root=0)
        while not work.is_completed():
            time.sleep(_LOOK_SECONDS)
        work.wait()
    except BaseException as error:  # of the thread that waits for the future
        sent.set_exception(error)
    else:
        sent.set_result(None)


def _dtype(name: str, dtype: str) -> torch.dtype:
    kind = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise WeightUpdateError(f"Weight {name} has type {dtype!r}, which torch does not know.")
    return kind


def nccl_version() -> str | None:
    """Return the version of NCCL that this process uses, such as ``2.28.9``, or None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # pyright: ignore[reportAttributeAccessIssue]


def nccl_version_of(python: str, environment: Mapping[str, str]) -> str | None:
    """Return the version of NCCL in the environment of another interpreter, or None if its torch has none or does not load.

    Args:
        python: the interpreter.
        environment: variables in addition to this process's own.
    """
    code = "import torch; print(*torch.cuda.nccl.version(), sep='.')"
    try:
        asked = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=_ASK_SECONDS, env={**os.environ, **environment}
        )
    except (OSError, subprocess.SubprocessError):  # the server's own start reports what is wrong with it
        return None
    return asked.stdout.strip() or None


def refuse_other_nccl(theirs: str | None, servers: str) -> None:
    """Check that the trainer and servers have one version of NCCL, whose ranks otherwise refuse each other.

    Args:
        theirs: version of the servers; None if it is unknown, which is no error.
        servers: the servers, in messages.

    Raises:
        WeightUpdateError: the versions differ.
    """
    if theirs is None or (ours := nccl_version()) is None or theirs.split(".")[:3] == ours.split(".")[:3]:
        return
    raise WeightUpdateError(
        f"NCCL is {ours} in the trainer and {theirs} in {servers}, and ranks of two versions form no group. Install one version in both "
        f"environments (for CUDA 12: pip install nvidia-nccl-cu12=={ours} in the servers'), or publish through shared memory or files "
        "(rollout.weight_update: shared or disk)."
    )


def buckets(
    named: Iterable[tuple[str, Tensor]], limit: int = BUCKET_BYTES, *, of_one_type: bool = False
) -> Iterator[list[tuple[str, Tensor]]]:
    """Split tensors into lists of at most ``limit`` bytes, in order; a larger tensor gets a list of its own.

    Args:
        named: the tensors.
        limit: size of a list in bytes.
        of_one_type: each list contains tensors of one type, so that they can be sent as one. Lists of different types fill
            independently.
    """
    filling: dict[torch.dtype | None, list[tuple[str, Tensor]]] = {}
    sizes: dict[torch.dtype | None, int] = {}
    for name, tensor in named:
        kind = tensor.dtype if of_one_type else None
        if filling.get(kind) and sizes[kind] + tensor.nbytes > limit:
            yield filling.pop(kind)
        if kind not in filling:
            filling[kind], sizes[kind] = [], 0
        filling[kind].append((name, tensor))
        sizes[kind] += tensor.nbytes
    yield from filling.values()
