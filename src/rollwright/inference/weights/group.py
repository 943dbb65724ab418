"""A process group of the trainer's first rank and the inference servers, over which weights are broadcast.

It is a group beside the default one of either side: neither has to have one, and a server may be in several.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, TCPStore

from rollwright.errors import WeightUpdateError

DEFAULT_GROUP = "weight_update_group"
#: Bytes of one bucket: large enough that a broadcast is bandwidth, small enough to fit beside the weights.
BUCKET_BYTES = 512 << 20


class WeightGroup:
    """Rank 0 sends, the others receive.

    Gloo works on CPU tensors and NCCL on GPU ones. SGLang joins a group by torch's own helper over a store that it prefixed
    before, so the keys of a rank stand below three prefixes: the group's name, the helper's ``name/``, and the device. Ours have
    to be the same, or both sides wait for each other until their time is over.
    """

    def __init__(
        self, master_address: str, master_port: int, rank: int, world_size: int, name: str, backend: str, timeout: float = 120.0
    ) -> None:
        """Args:
        master_address, master_port: of rank 0, which listens there.
        rank, world_size, name: of this process in the group, and of the group.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: seconds until a rank that does not come is given up.

        Raises:
            WeightUpdateError: the group could not be formed.
        """
        if backend not in ("gloo", "nccl"):
            raise WeightUpdateError(f"There is no backend {backend!r} for weight updates; use gloo or nccl.")
        if backend == "nccl" and not torch.cuda.is_available():
            raise WeightUpdateError("The nccl backend needs a GPU on both sides; use gloo.")
        if backend == "nccl":
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as SGLang's ranks have it; NCCL reads it at its first use
        limit = timedelta(seconds=timeout)
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        try:
            self._store: Any = TCPStore(master_address, master_port, world_size, rank == 0, limit)
            store = PrefixStore(f"{self.device.type}/", PrefixStore(f"{name}/", PrefixStore(name, self._store)))
            self._group: Any = None
            if backend == "gloo":
                self._group = dist.ProcessGroupGloo(store, rank, world_size, limit)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        except (RuntimeError, dist.DistError) as error:
            raise WeightUpdateError(
                f"Rank {rank} of {world_size} could not join the group {name!r} at {master_address}:{master_port} within "
                f"{timeout:g} s: {error}"
            ) from error
        self.rank, self.world_size, self.name = rank, world_size, name

    def broadcast(self, tensor: Tensor) -> None:
        """Send ``tensor`` from rank 0 into that of every other rank.

        Raises:
            WeightUpdateError: a rank is gone.
        """
        if self._group is None:
            raise WeightUpdateError(f"The group {self.name!r} was left; form another.")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            self._group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise WeightUpdateError(f"A broadcast in the group {self.name!r} failed: {error}") from error

    def close(self) -> None:
        """Leave the group: its connections close, so that ranks that wait for this one hear of it."""
        group, self._group, self._store = self._group, None, None
        if group is not None and self.device.type == "cuda":
            group.abort()

    def send(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Broadcast the tensors of one bucket, all of one type, as one flat tensor (rank 0)."""
        self.broadcast(torch.cat([tensor.detach().to(self.device).reshape(-1) for _, tensor in named]))

    def receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, flat: bool = False
    ) -> list[tuple[str, Tensor]]:
        """Receive the tensors that rank 0 sends in this order.

        Args:
            names, dtypes, shapes: one of each for a tensor.
            flat: they come as one tensor (SGLang's ``flattened_bucket``); else each comes alone.

        Raises:
            WeightUpdateError: a type has no name in torch, or a flat tensor would be of nothing.
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
        # Of several types they travel in the one that torch.cat makes of them, as SGLang's bucket does.
        together = torch.empty(sum(sizes), dtype=functools.reduce(torch.promote_types, kinds), device=self.device)
        self.broadcast(together)
        parts = [part.view(tuple(shape)) for part, shape in zip(together.split(sizes), shapes, strict=True)]
        return [(name, part.to(kind)) for name, part, kind in zip(names, parts, kinds, strict=True)]


def _dtype(name: str, dtype: str) -> torch.dtype:
    kind = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise WeightUpdateError(f"Weight {name} has type {dtype!r}, which torch does not know.")
    return kind


def buckets(
    named: Iterable[tuple[str, Tensor]], limit: int = BUCKET_BYTES, *, of_one_type: bool = False
) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in lists of at most ``limit`` bytes (one larger tensor is alone), in order.

    Args:
        named: the tensors.
        limit: bytes.
        of_one_type: the tensors of a list have one type, so that they can be sent as one; types take turns without closing each
            other's lists.
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
