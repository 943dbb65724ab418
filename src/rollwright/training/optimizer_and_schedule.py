"""Optimizers by name, the learning-rate schedule, and their state in a checkpoint."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.recipes import OPTIMIZERS
from rollwright.config.sections import OptimizerConfig
from rollwright.errors import ConfigError
from rollwright.training.fsdp import is_sharded
from rollwright.training.parallel import local_tensor
from rollwright.training.recovery_checkpoint import ModelTensors, fill


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer of a config over the trainable parameters. Weight decay applies to matrices, not to norms and biases.

    Raises:
        ConfigError: the optimizer is unknown or does not accept the arguments.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    arguments: dict[str, Any] = {"lr": config.lr, **config.kwargs}
    if config.kind in OPTIMIZERS.built_in:
        arguments = {"betas": (config.beta1, config.beta2), "eps": config.eps, **arguments}
    if config.kind == "adamw":  # the fused step is not used for shards on CPUs
        arguments.setdefault("fused", None if is_sharded(model) and trained and trained[0].device.type == "cpu" else True)
    try:
        return OPTIMIZERS.get(config.kind)(groups, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.kind={config.kind} does not take {arguments}: {error}; correct optimizer.kwargs."
        ) from error


def adamw_8bit(groups: list[dict[str, Any]], **arguments: Any) -> torch.optim.Optimizer:
    """Make torchao's AdamW with 8-bit moments (arXiv 2110.02861)."""
    return _of_torchao("AdamW8bit", groups, arguments)


def adamw_4bit(groups: list[dict[str, Any]], **arguments: Any) -> torch.optim.Optimizer:
    """Make torchao's AdamW with 4-bit moments (arXiv 2309.01507)."""
    return _of_torchao("AdamW4bit", groups, arguments)


def _of_torchao(name: str, groups: list[dict[str, Any]], arguments: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        from torchao import optim
    except ImportError as error:
        raise ConfigError(f"optimizer.kind={name.lower()} needs torchao: install rollwright[optimizers].") from error
    return getattr(optim, name)(groups, **arguments)


def learning_rate_factor(step: int, config: OptimizerConfig, total_steps: int | None) -> float:
    """Return the factor by which the peak learning rate is multiplied in a step.

    Args:
        step: number of steps already made, 0 in the first step.
        config: section with warm-up, schedule and minimum.
        total_steps: number of steps of the run. None if unknown; the factor is then always 1.

    Returns:
        The factor. Warm-up is linear and reaches 1 in its last step, so no step has rate 0.
    """
    if total_steps is None:
        return 1.0
    warmup = math.ceil(config.warmup_steps_proportion * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    falling = 1.0 - progress if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * falling


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, ft_spec: FinetuneSpec | None
) -> torch.optim.lr_scheduler.LambdaLR:
    """Make the learning-rate schedule of a run.

    Raises:
        ConfigError: the schedule depends on the length of the run, which is unknown.
    """
    total = ft_spec.total_steps if ft_spec is not None else None
    if not total and (config.lr_scheduler_type != "constant" or config.warmup_steps_proportion > 0):
        raise ConfigError(
            f"optimizer.lr_scheduler_type={config.lr_scheduler_type} with warmup_steps_proportion="
            f"{config.warmup_steps_proportion} needs the number of steps: pass a FinetuneSpec to initialize(), or use "
            "constant without warm-up."
        )
    factor = functools.partial(learning_rate_factor, config=config, total_steps=total or None)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group; some optimizers hold it as a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR
) -> dict[str, Any]:
    """Return the optimizer's moments by parameter name (each rank's shards), the schedule and the learning rates.

    Quantised moments are saved as float32 and quantised again when they are loaded.
    """
    moments: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if entry := optimizer.state.get(parameter):
            moments[name] = {key: _plain(value) if isinstance(value, Tensor) else value for key, value in entry.items()}
    schedule = {
        key: value
        for key, value in scheduler.state_dict().items()
        if key != "lr_lambdas" and (isinstance(value, int | float | list) or value is None)
    }
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return {"optimizer": ModelTensors(moments), "scheduler": schedule, "learning_rates": rates}


def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    state: dict[str, Any],
) -> None:
    """Restore optimizer and schedule from a result of ``optimizer_state`` or from a checkpoint."""
    _allocate_state(optimizer)
    pairs: list[tuple[Any, Tensor]] = []
    quantised: list[tuple[Tensor, Tensor]] = []
    for name, parameter in model.named_parameters():
        if (saved := state["optimizer"].get(name)) is None:
            optimizer.state.pop(parameter, None)
            continue
        for key, value in saved.items():
            if not isinstance(own := optimizer.state[parameter].get(key), Tensor):
                optimizer.state[parameter][key] = value
                continue
            target = own.detach()
            if _is_quantised(own):
                target = torch.zeros_like(parameter, dtype=torch.float32)
                quantised.append((own, target))
            pairs.append((value, target))
    fill(pairs)
    for own, target in quantised:
        local_tensor(own).copy_(local_tensor(target))
    scheduler.load_state_dict({**scheduler.state_dict(), **state["scheduler"]})
    for group, rate in zip(optimizer.param_groups, state["learning_rates"], strict=True):
        set_learning_rate(group, rate)


@torch.no_grad()
def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate its state, by taking a step with learning rate 0 and gradient 0."""
    if optimizer.state:
        return
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        set_learning_rate(group, 0.0)
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_learning_rate(group, rate)


def _is_quantised(value: Tensor) -> bool:
    return type(local_tensor(value)) not in (Tensor, nn.Parameter)


def _plain(value: Tensor) -> Tensor:
    if not _is_quantised(value):
        return value.detach()
    plain = local_tensor(value).dequantize().float()
    if not isinstance(value, DTensor):
        return plain
    return DTensor.from_local(
        plain, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
