"""Communication between training processes (ranks): join them, exchange messages, sum numbers and statistics over them.

Training numbers go over the default group (NCCL on GPUs, Gloo on CPUs). Messages go over a control group: Gloo everywhere, with a
timeout of days, because the other ranks wait there while the first rank samples, writes or sends weights.

With one process, the functions do not communicate and return their inputs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from rollwright import errors
from rollwright.errors import LostRankError, TrainingError

#: Timeout of the control group.
CONTROL_TIMEOUT = timedelta(days=7)

_store: Any = None  # a rank that fails writes the cause here
_neighbours: dict[int, int] = {}  # on the first rank: process ids of the ranks on its host
_control_groups: weakref.WeakKeyDictionary[Any, Any] = (
    weakref.WeakKeyDictionary()
)  # default group -> control and checkpoint group


def environment_ranks() -> int:
    """Return the number of ranks that have joined or, before that, the number in torchrun's ``WORLD_SIZE``."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def join_processes(device: torch.device, *, also_alone: bool = False) -> torch.device:
    """Join the process group that torchrun's environment describes (``WORLD_SIZE``, ``RANK``, ``MASTER_ADDR``, …).

    Args:
        device: device of the model.
        also_alone: create a group even for one process, which a sharded model needs.

    Returns:
        The device of this rank. If several ranks train on CUDA, it is the GPU with the number ``LOCAL_RANK``.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # Gloo on GPUs, too, for tensors on the CPU
    if environment_ranks() <= 1:
        if also_alone and not dist.is_initialized():
            importlib.import_module("torch.distributed.nn.functional")  # see below
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.cuda.device_count():
            raise TrainingError(
                f"This host has {torch.cuda.device_count()} GPUs and at least {device.index + 1} training processes: start one process for "
                "each GPU, or set the model's device to cpu."
            )
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise TrainingError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and the environment has no {' and no '.join(missing)}: start several processes "
                "with cluster.processes or torchrun, and one with WORLD_SIZE unset."
            )
        # This module's default arguments hold the process group that exists at import time. If it were imported later, Gloo's threads
        # would outlive ``destroy_process_group``, and a thread that frees a tensor while Python shuts down aborts the process.
        importlib.import_module("torch.distributed.nn.functional")
        global _store
        # As in SGLang's ranks, which the first rank may meet in a group: NCCL reads it once, at the first group of this process.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        store, number, size = next(rendezvous("env://"))
        dist.init_process_group(backend, store=PrefixStore("training", store), rank=number, world_size=size)
        control_group()
        _store = PrefixStore("rollwright", store)
        _meet_neighbours(size)
    return device


def leave_processes() -> None:
    """Leave the process group if this process has joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet_neighbours(size: int) -> None:
    own = f"{socket.gethostname()} {os.getpid()}"
    _store.set(f"process/{rank()}", own)
    if rank() == 0:
        processes = {other: _store.get(f"process/{other}").decode().split() for other in range(1, size)}
        _neighbours.update({other: int(pid) for other, (host, pid) in processes.items() if host == own.split()[0]})


def lost_neighbour() -> int | None:
    """Return a rank on this host whose process has ended, or None. Ranks other than the first always return None."""
    for other, pid in _neighbours.items():
        try:
            os.kill(pid, 0)
        except OSError:
            return other
    return None


def is_first_cause(message: str) -> bool:
    """Publish why this rank ends. Returns True if no other rank has published a cause before."""
    number, store = os.environ.get("RANK", "0"), _store
    if store is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return number == "0"  # the ranks have not joined and share no store
    try:
        mine = f"rank {number}: {message}"
        store = store or PrefixStore("rollwright", next(rendezvous("env://"))[0])
        return store.compare_set("cause", "", mine).decode() == mine
    except RuntimeError:  # the process that hosts the store has ended and reported its cause
        return False


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raise ``LostRankError`` instead of the error that a collective call raises when another rank has ended.

    Raises:
        LostRankError: another rank has ended.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "Connection ", "Socket ")):
            raise LostRankError(f"another process of the training has ended ({text.splitlines()[0]})") from error
        raise


def control_group() -> dist.ProcessGroup:
    """Return the process group for messages between ranks. The first call is collective."""
    return _groups_beside()[0]


def checkpoint_group() -> dist.ProcessGroup | None:
    """Return the process group for checkpoints, or None with one process.

    Checkpoints have their own group so that a background thread can use it while training uses the others.
    """
    return _groups_beside()[1] if world_size() > 1 else None


def _groups_beside() -> list[Any]:
    world = dist.group.WORLD
    groups = [found() for found in _control_groups.get(world, ())]
    if not groups or None in groups:
        groups = [dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT) for _ in range(2)]
        _control_groups[world] = [weakref.ref(group) for group in groups]  # torch holds them until ``leave_processes``
    return groups


def world_size() -> int:
    """Return the number of ranks that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def summed(value: Tensor) -> Tensor:
    """Sum a tensor over ranks."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
    return value


def largest(value: int, device: torch.device) -> int:
    """Return the maximum of a number over ranks."""
    if world_size() == 1:
        return value
    box = torch.tensor(value, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)


def wait_for_all() -> None:
    """Wait until every rank has called this function."""
    if world_size() > 1:
        dist.barrier(group=control_group())


def from_first_rank(make: Callable[[], Any]) -> Any:
    """Call ``make`` on the first rank and return its result on every rank. If ``make`` fails, every rank raises.

    Args:
        make: called on the first rank only, for as long as it needs; returns a JSON value.

    Raises:
        RollwrightError: the error that ``make`` raised, on every rank. Any other exception becomes a ``TrainingError`` on the other ranks.
    """
    if world_size() == 1:
        return make()
    control_group()  # before the first rank calls ``make``, because creating it needs all ranks
    failure, text = _outcome(make) if rank() == 0 else (None, "")
    return _value_of(json.loads(broadcast(text.encode())), failure, "on the first rank")


def on_all_ranks(make: Callable[[], Any]) -> list[Any]:
    """Call ``make`` on each rank and return the results in rank order on every rank. If one call fails, every rank raises.

    Args:
        make: returns a JSON value.

    Raises:
        RollwrightError: see ``from_first_rank``. The message names the rank.
    """
    failure, text = _outcome(make)
    parts = gathered(text.encode())
    answers = json.loads(broadcast(json.dumps([json.loads(part) for part in parts or []]).encode()))
    return [_value_of(answer, failure, f"on rank {number}") for number, answer in enumerate(answers)]


def _outcome(make: Callable[[], Any]) -> tuple[Exception | None, str]:
    try:
        return None, json.dumps({"value": make()})
    except Exception as error:  # any exception, because the other ranks wait for an answer
        return error, json.dumps({"error": type(error).__name__, "message": str(error)})


def _value_of(answer: dict[str, Any], failure: Exception | None, where: str) -> Any:
    if failure is not None:
        raise failure
    if "error" in answer:
        kind = getattr(errors, answer["error"], TrainingError)  # one of our errors; the failed rank shows others in full
        raise kind(f"{where}: {answer['message']}")
    return answer["value"]


def broadcast(data: bytes) -> bytes:
    """Send the first rank's bytes to every rank."""
    if world_size() == 1:
        return data
    size = torch.tensor(len(data))
    dist.broadcast(size, src=0, group=control_group())
    letters = torch.frombuffer(bytearray(data), dtype=torch.uint8) if rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    if int(size):
        dist.broadcast(letters, src=0, group=control_group())
    return letters.numpy().tobytes()


def scattered(parts: list[bytes] | None) -> bytes:
    """Send each rank its part of ``parts``, which only the first rank passes, and return this rank's part."""
    if world_size() == 1:
        assert parts is not None
        return parts[0]
    sizes = torch.tensor([len(part) for part in parts]) if parts is not None else torch.empty(world_size(), dtype=torch.long)
    dist.broadcast(sizes, src=0, group=control_group())
    if parts is not None:
        for other, part in enumerate(parts[1:], 1):
            dist.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), other, group=control_group())
        return parts[0]
    letters = torch.empty(int(sizes[rank()]), dtype=torch.uint8)
    dist.recv(letters, 0, group=control_group())
    return letters.numpy().tobytes()


def gathered(part: bytes) -> list[bytes] | None:
    """Gather the bytes of every rank. The first rank returns them in rank order, the other ranks return None."""
    if world_size() == 1:
        return [part]
    sizes = torch.zeros(world_size(), dtype=torch.long)
    sizes[rank()] = len(part)
    dist.all_reduce(sizes, group=control_group())
    if rank() != 0:
        dist.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), 0, group=control_group())
        return None
    parts = [part]
    for other in range(1, world_size()):
        letters = torch.empty(int(sizes[other]), dtype=torch.uint8)
        dist.recv(letters, other, group=control_group())
        parts.append(letters.numpy().tobytes())
    return parts


def gathered_rows(value_B: Tensor) -> tuple[Tensor, slice]:
    """Gather the rows of all ranks in rank order, and return them with the slice of this rank's rows.

    Ranks may have different numbers of rows.
    """
    if world_size() == 1:
        return value_B, slice(0, value_B.shape[0])
    sizes = torch.zeros(world_size(), dtype=torch.long, device=value_B.device)
    sizes[rank()] = value_B.shape[0]
    dist.all_reduce(sizes)
    padded = value_B.new_zeros(int(sizes.max()))
    padded[: value_B.shape[0]] = value_B
    parts = [torch.zeros_like(padded) for _ in range(world_size())]
    dist.all_gather(parts, padded)
    start = int(sizes[: rank()].sum())
    joined = torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])
    return joined, slice(start, start + value_B.shape[0])


def full_tensor(value: Any) -> Tensor:
    """Gather a sharded tensor on every rank; other tensors are returned unchanged. Collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_tensor(value: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor; other tensors are returned unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def sharded_like(whole: Tensor, target: Tensor) -> Tensor:
    """Move a whole tensor, which every rank has, to the device of ``target`` and shard it the same way."""
    whole = whole.to(target.device)
    if isinstance(target, DTensor):
        return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    return whole


def sharded_from(whole: Tensor, target: Tensor, source: int) -> Tensor:
    """Move a whole tensor, whose values only one rank has, to the device of ``target`` and shard it the same way. Collective.

    Args:
        whole: the tensor; on other ranks than the source, any tensor of this shape and type, such as one on the meta device.
        target: tensor that is sharded over the ranks.
        source: the rank that has the values; 0 if copies of the shards are replicated (``is_replicated``).
    """
    whole = torch.empty_like(whole, device=target.device) if whole.is_meta else whole.to(target.device)
    if isinstance(target, DTensor):
        return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=source)
    if world_size() > 1:
        dist.broadcast(whole, src=source)
    return whole


def is_replicated(tensor: Tensor) -> bool:
    """Return whether several groups of ranks hold a copy of a sharded tensor each."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 1


_NEGATED = "-"


class TokenStatistics:
    """Accumulates masked means and extremes on the device. Only ``export`` synchronises."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums: dict[str, Tensor] = {}  # sum of the values, and number of values
        self._largest: dict[str, Tensor] = {}

    @torch.no_grad()
    def mean(self, name: str, values_BL: Tensor, mask_BL: Tensor) -> None:
        """Add the values whose mask is 1 to the mean ``name``."""
        mask_BL = mask_BL.to(values_BL.dtype)
        self.add(name, (values_BL * mask_BL).sum(), mask_BL.sum())

    @torch.no_grad()
    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add a sum and its denominator."""
        pair = torch.stack([value.detach().to(self.device, torch.float64) for value in (total, count)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    @torch.no_grad()
    def largest(self, name: str, values_BL: Tensor, mask_BL: Tensor) -> None:
        """Update the maximum ``name`` with the values whose mask is 1."""
        masked = values_BL.detach().double().masked_fill(mask_BL <= 0, -torch.inf)
        found = masked.max() if masked.numel() else torch.tensor(-torch.inf, dtype=torch.float64, device=self.device)
        self._largest[name] = torch.maximum(self._largest[name], found) if name in self._largest else found

    def smallest(self, name: str, values_BL: Tensor, mask_BL: Tensor) -> None:
        """Update the minimum ``name`` with the values whose mask is 1."""
        self.largest(_NEGATED + name, -values_BL, mask_BL)

    def export(self) -> dict[str, float]:
        """Return every mean and extreme over all ranks. Names without a value are left out. Collective."""
        result: dict[str, float] = {}
        if self._sums:
            pairs = summed(torch.stack(list(self._sums.values()))).tolist()
            result |= {name: total / count for name, (total, count) in zip(self._sums, pairs, strict=True) if count > 0}
        if self._largest:
            values = torch.stack(list(self._largest.values()))
            if world_size() > 1:
                dist.all_reduce(values, op=dist.ReduceOp.MAX)
            for name, value in zip(self._largest, values.tolist(), strict=True):
                if value != -torch.inf:
                    result[name.removeprefix(_NEGATED)] = -value if name.startswith(_NEGATED) else value
        return result
