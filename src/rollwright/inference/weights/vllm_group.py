"""The NCCL group that vLLM's weight-transfer engine joins, formed without vLLM in the trainer's environment.

Rank 0 creates NCCL's id and sends it to the servers in the request to join. Every rank creates a communicator from it, and all ranks
reduce one number, as vLLM's ranks do on joining. Then each tensor is broadcast on its own, in the order of the names that were
announced to the server.
"""

from __future__ import annotations

import base64
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.cuda.nccl
from torch import Tensor

from rollwright.errors import WeightUpdateError
from rollwright.inference.weights.group import GroupPlace


class VLLMGroup:
    """Rank 0 of a group with vLLM's workers."""

    @staticmethod
    def invitation() -> str:
        """Create NCCL's id for a new group, in standard base64 as vLLM expects it."""
        return base64.b64encode(torch.cuda.nccl.unique_id()).decode()

    def __init__(self, place: GroupPlace, timeout: float = 120.0) -> None:
        """Args:
        place: size of the group, and the invitation that was sent to the servers.
        timeout: seconds to wait for a rank that does not join or does not receive a tensor.

        Raises:
            WeightUpdateError: the group could not be formed.
        """
        self.name, self._timeout = place.group_name, timeout
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)
        unique_id = base64.b64decode(place.invitation)
        formed: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def form() -> None:
            try:
                torch.cuda.set_device(self._device)
                formed.put(torch.cuda.nccl.init_rank(place.world_size, unique_id, 0))
            except RuntimeError as error:
                formed.put(error)

        # In a thread that may be left behind, because NCCL waits for the other ranks without a time limit.
        threading.Thread(target=form, name="rollwright-nccl", daemon=True).start()
        try:
            self._communicator = formed.get(timeout=timeout)
        except queue.Empty:
            raise WeightUpdateError(
                f"The {place.world_size - 1} ranks of the vLLM servers did not join within {timeout:g} s; look at the servers' logs."
            ) from None
        if isinstance(self._communicator, RuntimeError):
            raise WeightUpdateError(f"The NCCL group with the vLLM servers could not be formed: {self._communicator}")
        with torch.cuda.stream(self._stream):
            agreed = torch.zeros(1, device=self._device)
            torch.cuda.nccl.all_reduce([agreed], streams=[self._stream], comms=[self._communicator])
        self._wait("the servers' ranks did not meet this one")

    def send(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Broadcast each tensor on its own; see ``SendingHalf.send``."""
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
        """Wait until the stream is done, up to the time limit, because a rank may be gone."""
        done = torch.cuda.Event()
        done.record(self._stream)
        deadline = time.monotonic() + self._timeout
        while not done.query():
            if time.monotonic() > deadline:
                raise WeightUpdateError(f"Within {self._timeout:g} s {otherwise}; look at the servers' logs.")
            time.sleep(0.0005)

    def close(self) -> None:
        """Leave the group."""
        self._communicator = None
