"""Models sharded over ranks with FSDP2. They are created without memory, then filled and gathered one tensor at a time.

No rank holds the whole model, only its shard and one whole tensor (or one layer during computation).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from rollwright.config.sections import TrainEngineConfig
from rollwright.errors import ConfigError
from rollwright.inference.weights.adapter import AdapterSpec
from rollwright.inference.weights.stream import WeightStream
from rollwright.training import parallel
from rollwright.training.parallel import full_tensor, sharded_like

# Training with one process is an ordinary case.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

Result = TypeVar("Result")

#: Messages from rank 0 to the others while it reads whole weights.
_GATHER, _ENOUGH = b"gather", b"enough"


def wants_sharding(config: TrainEngineConfig, device: torch.device, *, is_shared: bool) -> bool:
    """Return whether to shard a model's parameters.

    Args:
        config: section of the model. ``shard: auto`` shards over several ranks. Unless ``is_shared``, it also shards on a single GPU, so
            that one rank computes the same as eight.
        device: device of the model.
        is_shared: True if an engine in this process may compute with the model's own tensors, which must then be whole.

    Raises:
        ConfigError: the setting cannot be applied.
    """
    ranks = parallel.environment_ranks()
    if config.cpu_offload and device.type != "cuda":
        raise ConfigError(
            "cpu_offload moves the shards of a GPU to the host's memory, but this model is on a CPU and its shards are already there."
        )
    if config.shard == "never" and not config.cpu_offload:
        if ranks > 1:
            raise ConfigError("shard is never, but several ranks train: set shard_size=1, so that each holds a whole copy.")
        return False
    return config.cpu_offload or config.shard == "always" or ranks > 1 or (device.type == "cuda" and not is_shared)


def shard(
    module: nn.Module, layers: list[nn.Module], compute_dtype: torch.dtype, config: TrainEngineConfig, device: torch.device
) -> None:
    """Shard a model's parameters, gradients and optimizer state in place, with one FSDP unit for each layer.

    Args:
        module: the outermost module whose forward pass is called.
        layers: the blocks that are gathered one at a time.
        compute_dtype: type in which parameters are gathered; gradients are reduced in float32.
        config: section with ``shard_size`` and ``cpu_offload``.
        device: device that computes.

    Raises:
        ConfigError: ``shard_size`` does not divide the number of ranks.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if compute_dtype in (torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.cpu_offload else OffloadPolicy()
    place = {"mesh": _mesh(device.type, config.shard_size), "mp_policy": policy, "offload_policy": offload}
    for layer in layers:
        fully_shard(layer, **place)
    fully_shard(module, **place)


def _mesh(device: str, shard_size: int | None) -> Any:
    world = parallel.world_size()
    size = shard_size or world
    if world % size:
        raise ConfigError(f"shard_size={size} does not divide the {world} ranks: choose a divisor, or leave it out.")
    return _mesh_of(dist.group.WORLD, device, world // size, size)


@functools.lru_cache(maxsize=4)
def _mesh_of(group: Any, device: str, copies: int, size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if copies == 1:
        return init_device_mesh(device, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (copies, size), mesh_dim_names=("copy", "shard"))


def is_sharded(model: nn.Module) -> bool:
    """Return True if FSDP (1 or 2) shards a model's parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters()) or any(
        isinstance(module, FullyShardedDataParallel) for module in model.modules()
    )


def reshard(module: nn.Module) -> None:
    """Reshard parameters that a forward pass without a backward pass left gathered."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate meta-device parameters on ``device``; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks of a Hugging Face model, according to its ``_no_split_modules``."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, without gathering them. A tied tensor appears once, under its first name."""
    named = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    first: dict[int, str] = {}
    return {name: tensor.detach() for name, tensor in named.items() if first.setdefault(id(tensor), name) == name}


def whole_weights(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    *,
    names: Mapping[str, str] | None = None,
    adapter: AdapterSpec | None = None,
) -> WeightStream:
    """Stream a model's tensors by name; each is gathered when it is read. Collective.

    Args:
        model: a model, sharded or not. Tensors that are neither sharded nor converted are not copied.
        dtype: type to convert floating-point tensors to. If None, each tensor keeps its own type.
        names: name of each tensor in the stream, and its name in the model. If None, all tensors under the model's names.
        adapter: describes the adapter that the tensors are.
    """

    def kind(tensor: Tensor) -> torch.dtype:
        return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype

    own = own_tensors(model)
    chosen = {name: name for name in own} if names is None else names
    described = [(name, torch.empty(own[inner].shape, dtype=kind(own[inner]), device="meta")) for name, inner in chosen.items()]

    def read() -> Iterator[tuple[str, Tensor]]:
        own = own_tensors(model)
        for name, described_as in stream.described:
            yield name, full_tensor(own[chosen[name]].to(described_as.dtype))

    stream = WeightStream(described, read, adapter)
    return stream


def with_whole_weights(weights: WeightStream, use: Callable[[WeightStream], Result]) -> Result:
    """Gather the weights, pass them to ``use`` on rank 0, and return the result of ``use`` on every rank. Collective.

    ``use`` may read the stream any number of times and stop early. If it fails, every rank raises.

    Args:
        weights: stream over the ranks' model, the same on each rank.
        use: called on rank 0 only; returns a JSON value.
    """
    if parallel.world_size() == 1:
        return use(weights)
    if parallel.rank() != 0:
        while parallel.broadcast(b"") == _GATHER:
            for _ in weights:
                pass
        return parallel.from_first_rank(lambda: None)
    opened: list[Any] = []

    def read() -> Iterator[tuple[str, Tensor]]:
        def pairs() -> Iterator[tuple[str, Tensor]]:
            parallel.broadcast(_GATHER)
            rest = iter(weights)
            try:
                for pair in rest:  # noqa: UP028 - "yield from" would end the rest with this
                    yield pair
            finally:
                for _ in rest:
                    pass

        while opened:  # finish a stream that was left early, because the other ranks are still gathering
            opened.pop().close()
        opened.append(pairs())
        return opened[-1]

    def use_and_end() -> Result:
        try:
            return use(WeightStream(weights.described, read, weights.adapter))
        finally:
            for pairs in opened:
                pairs.close()
            parallel.broadcast(_ENOUGH)

    return parallel.from_first_rank(use_and_end)


def initialise_randomly(model: nn.Module) -> None:
    """Initialise weights with the architecture's own rule, one module at a time; the result does not depend on the number of ranks.

    The weights differ from those of an unsharded model with the same seed, which draws them in another order.
    """
    seed = parallel.from_first_rank(lambda: torch.initial_seed() % (1 << 62))
    done: set[int] = set()

    def visit(module: nn.Module, owner: Any) -> None:
        owner = module if hasattr(module, "_init_weights") else owner
        for child in module.children():
            visit(child, owner)
        targets = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in done}
        if not targets or owner is None:
            return
        before = dict(module._parameters)
        for name, parameter in targets.items():
            module._parameters[name] = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype))
        owner._init_weights(module)
        for name, parameter in targets.items():
            parameter.copy_(sharded_like(module._parameters[name].detach(), parameter))  # type: ignore[union-attr]
            done.add(id(parameter))
        module._parameters.update(before)

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        visit(model, None)


def call_checkpoint(function: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """Call a function of ``torch.distributed.checkpoint``, without communication if there is one process."""
    return function(*arguments, no_dist=parallel.world_size() == 1, **options)
