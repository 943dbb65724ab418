"""Several processes as plain functions: join them, shard a model over them, sum numbers and statistics across them.

One process is the ordinary case and needs none of this: every function is then the identity.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollwright import errors
from rollwright.errors import TrainingError


def join_processes(device: torch.device) -> torch.device:
    """Join the process group that torchrun's environment describes (``WORLD_SIZE``, ``RANK``, ``MASTER_ADDR``, …).

    Returns:
        The device of this rank: on CUDA, that of ``LOCAL_RANK``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise TrainingError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set: start with torchrun."
            )
        # Its default arguments keep the group that exists when it is imported. Imported later, it would keep Gloo's threads alive
        # after ``destroy_process_group``, and one that frees a tensor while Python ends aborts the process.
        importlib.import_module("torch.distributed.nn.functional")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def world_size() -> int:
    """Number of ranks that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def summed(value: Tensor) -> Tensor:
    """The sum of a tensor over ranks."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
    return value


def largest(value: int, device: torch.device) -> int:
    """The largest of a number over ranks."""
    if world_size() == 1:
        return value
    box = torch.tensor(value, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)


def wait_for_all() -> None:
    """Return when every rank has come here."""
    if world_size() > 1:
        dist.barrier()


def from_first_rank(make: Callable[[], Any], device: torch.device) -> Any:
    """What ``make`` returns on the first rank, on every rank; where it fails there, every rank raises.

    Args:
        make: called on the first rank alone; returns what JSON can hold.
        device: of tensors that ranks exchange.

    Raises:
        RollwrightError: of the type that ``make`` raised, with its message; ``TrainingError`` for any other failure.
    """
    if world_size() == 1:
        return make()
    failure: Exception | None = None
    told: dict[str, Any] = {}
    if rank() == 0:
        try:
            told = {"value": make()}
        except Exception as error:  # whatever it is: the other ranks wait to be told
            failure, told = error, {"error": type(error).__name__, "message": str(error)}
    letters = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8, device=device)
    size = torch.tensor(len(letters), device=device)
    dist.broadcast(size, src=0)
    if rank() != 0:
        letters = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(letters, src=0)
    if failure is not None:
        raise failure
    told = json.loads(bytes(letters.tolist()))
    if "error" in told:
        kind = getattr(errors, told["error"], TrainingError)  # ours, else one that the first rank shows in full
        raise kind(f"on the first rank: {told['message']}")
    return told["value"]


def gathered_rows(value_B: Tensor) -> tuple[Tensor, slice]:
    """The rows of all ranks in rank order, and where this rank's are among them. Ranks may have different numbers of rows."""
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


def shard(module: nn.Module, layers: list[nn.Module], compute_dtype: torch.dtype) -> nn.Module:
    """Shard a model's parameters, gradients and optimizer state over all ranks (FSDP2), one unit for each layer.

    Args:
        module: the outermost module whose forward pass is called.
        layers: the blocks that are gathered one at a time.
        compute_dtype: type that parameters are gathered in; gradients are summed in float32.
    """
    if world_size() == 1:
        return module
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if compute_dtype in (torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(module, mp_policy=policy)  # in place
    return module


def full_tensor(value: Any) -> Tensor:
    """A sharded tensor put together (on every rank); an ordinary one as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def placed_like(whole: Tensor, target: Tensor) -> Tensor:
    """A whole tensor on the device of ``target``, sharded as it is."""
    whole = whole.to(target.device)
    if hasattr(target, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole, target.device_mesh, target.placements)  # type: ignore[attr-defined]
    return whole


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks of a Hugging Face model, by its own list of classes that are not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]


_NEGATED = "-"


class TokenStatistics:
    """Accumulates masked means and extremes without a device synchronisation for each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}

    @torch.no_grad()
    def mean(self, name: str, values_BL: Tensor, mask_BL: Tensor) -> None:
        """Add values to the mean called ``name``, where the mask is 1."""
        mask_BL = mask_BL.to(values_BL.dtype)
        self.add(name, (values_BL * mask_BL).sum(), mask_BL.sum())

    @torch.no_grad()
    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add a sum and the number that it is divided by."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        self._sums[name] = self._sums.get(name, zero) + total.detach().double()
        self._counts[name] = self._counts.get(name, zero) + count.detach().double()

    @torch.no_grad()
    def largest(self, name: str, values_BL: Tensor, mask_BL: Tensor) -> None:
        """Keep the largest value where the mask is 1."""
        masked = values_BL.detach().double().masked_fill(mask_BL <= 0, -torch.inf)
        found = masked.max() if masked.numel() else torch.tensor(-torch.inf, dtype=torch.float64, device=self.device)
        self._largest[name] = torch.maximum(self._largest[name], found) if name in self._largest else found

    def smallest(self, name: str, values_BL: Tensor, mask_BL: Tensor) -> None:
        """Keep the smallest value where the mask is 1."""
        self.largest(_NEGATED + name, -values_BL, mask_BL)

    def export(self) -> dict[str, float]:
        """Every mean and extreme over all ranks; what was never seen is left out."""
        result: dict[str, float] = {}
        if self._sums:
            pairs = summed(torch.stack([torch.stack([self._sums[name], self._counts[name]]) for name in self._sums])).tolist()
            result |= {name: total / count for name, (total, count) in zip(self._sums, pairs, strict=True) if count > 0}
        if self._largest:
            values = torch.stack(list(self._largest.values()))
            if world_size() > 1:
                dist.all_reduce(values, op=dist.ReduceOp.MAX)
            for name, value in zip(self._largest, values.tolist(), strict=True):
                if value != -torch.inf:
                    result[name.removeprefix(_NEGATED)] = -value if name.startswith(_NEGATED) else value
        return result
