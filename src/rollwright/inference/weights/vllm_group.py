"""The NCCL group that vLLM's weight-transfer engine joins, formed without vLLM in the trainer's environment.

vLLM meets in a ``TCPStore`` of its own form: rank 0 publishes NCCL's id under one key, pickled as vLLM's own class, every rank
makes a communicator of it, and all reduce one number. After that each tensor is broadcast by itself, in the order of the names
that the server was told.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rollwright.errors import WeightUpdateError
from rollwright.inference.weights.broadcast import GroupPlace

#: The key of the first object that rank 0 sends to all.
ID_KEY = "broadcast_from/0/0"
_ID_CLASS = ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId")
_ID_BYTES = 128


def pickled_id(unique_id: bytes) -> bytes:
    """NCCL's id as the pickle of vLLM's structure, which vLLM's ranks load; vLLM need not be installed here.

    It calls ``_ctypes._unpickle(ncclUniqueId, ({}, unique_id))``, as the pickle of any ctypes structure does.
    """
    if len(unique_id) != _ID_BYTES:
        raise WeightUpdateError(f"NCCL's id has {len(unique_id)} bytes, not {_ID_BYTES}.")
    module, name = _ID_CLASS
    of_class = f"c{module}\n{name}\n".encode()
    return b"\x80\x03c_ctypes\n_unpickle\n" + of_class + b"}C" + bytes([_ID_BYTES]) + unique_id + b"\x86\x86R."


def meeting_point(place: GroupPlace, timeout: float) -> Any:
    """The store of rank 0; returns when every rank has come.

    Raises:
        WeightUpdateError: one did not within ``timeout`` seconds.
    """
    try:
        limit = timedelta(seconds=timeout)
        return TCPStore(place.master_address, place.master_port, place.world_size, True, limit, use_libuv=False)
    except (RuntimeError, dist.DistError) as error:
        raise WeightUpdateError(
            f"The {place.world_size - 1} ranks of the vLLM servers did not come to {place.master_address}:{place.master_port} within "
            f"{timeout:g} s: {error}"
        ) from error


class VLLMGroup:
    """Rank 0 of a group with vLLM's workers."""

    def __init__(self, place: GroupPlace, timeout: float = 120.0) -> None:
        """Args:
        place: where the group meets.
        timeout: seconds until a rank that does not come, or takes no tensor, is given up.

        Raises:
            WeightUpdateError: the group could not be formed.
        """
        self.name, self._timeout = place.group_name, timeout
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._store = meeting_point(place, timeout)
        try:
            unique_id = torch.cuda.nccl.unique_id()
            self._store.set(ID_KEY, pickled_id(unique_id))
            self._stream = torch.cuda.Stream(self._device)
            self._communicator: Any = torch.cuda.nccl.init_rank(place.world_size, unique_id, 0)
            with torch.cuda.stream(self._stream):
                agreed = torch.zeros(1, device=self._device)
                torch.cuda.nccl.all_reduce([agreed], streams=[self._stream], comms=[self._communicator])
        except RuntimeError as error:
            raise WeightUpdateError(f"The NCCL group with the vLLM servers could not be formed: {error}") from error
        self._wait("the servers' ranks did not meet this one")

    def send(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Broadcast each tensor by itself; see ``SendingHalf.send``."""
        if self._communicator is None:
            raise WeightUpdateError(f"The group {self.name!r} was left; form another.")
        tensors = [tensor.detach().to(self._device).contiguous() for _, tensor in named]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                for tensor in tensors:
                    torch.cuda.nccl.broadcast([tensor], streams=[self._stream], comms=[self._communicator])
        except RuntimeError as error:
            raise WeightUpdateError(f"A broadcast to the vLLM servers failed: {error}") from error
        self._wait("the servers did not take a bucket")

    def _wait(self, otherwise: str) -> None:
        """Return when the stream is done. NCCL itself has no limit: a rank that is gone would be waited for for ever."""
        done = torch.cuda.Event()
        done.record(self._stream)
        deadline = time.monotonic() + self._timeout
        while not done.query():
            if time.monotonic() > deadline:
                raise WeightUpdateError(f"Within {self._timeout:g} s {otherwise}; look at the servers' logs.")
            time.sleep(0.0005)

    def close(self) -> None:
        """Leave the group."""
        self._communicator = self._store = None
