"""AdamW, its parameter groups, the learning rate's schedule, and the state of both."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import OptimizerConfig
from rollwright.errors import ConfigError
from rollwright.training import parallel


def make_optimizer(model: nn.Module, config: OptimizerConfig, *, sharded: bool = False) -> torch.optim.AdamW:
    """AdamW over the parameters that train; weight decay only on matrices, not on norms and biases.

    Args:
        model: whose parameters are optimised.
        config: rates and decays.
        sharded: parameters are sharded by FSDP, for which the fused step is not used on CPUs.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    on_cpu = bool(trained) and trained[0].device.type == "cpu"
    fused = not (sharded and on_cpu)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused or None,
    )


def learning_rate_factor(step: int, config: OptimizerConfig, total_steps: int | None) -> float:
    """What the peak learning rate is multiplied by in a step.

    Args:
        step: steps already made; 0 in the first.
        config: warm-up, schedule and where it ends.
        total_steps: steps of the run; None where unknown, which only a constant rate without warm-up allows.

    Returns:
        Warm-up grows linearly and reaches 1 in its last step, so that no step is made at rate 0.
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
    """The schedule of a run.

    Raises:
        ConfigError: the schedule depends on the length of the run, and that is not known.
    """
    total = ft_spec.total_steps if ft_spec is not None else None
    if not total and (config.lr_scheduler_type != "constant" or config.warmup_steps_proportion > 0):
        raise ConfigError(
            f"optimizer.lr_scheduler_type={config.lr_scheduler_type} with warmup_steps_proportion="
            f"{config.warmup_steps_proportion} needs the number of steps: pass a FinetuneSpec to initialize(), or use "
            "constant without warm-up."
        )
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, config, total or None))


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR
) -> dict[str, Any]:
    """Moments by parameter name, schedule and learning rates, whole on every rank."""
    moments: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        entry = optimizer.state.get(parameter)
        if entry:
            moments[name] = {key: parallel.full_tensor(value).detach().cpu().clone() for key, value in entry.items()}
    schedule = {
        key: value
        for key, value in scheduler.state_dict().items()
        if key != "lr_lambdas" and (isinstance(value, int | float | list) or value is None)
    }
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return {"optimizer": moments, "scheduler": schedule, "learning_rates": rates}


def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    state: dict[str, Any],
) -> None:
    """Set optimizer and schedule to what ``optimizer_state`` gave; moments are sharded as their parameters are."""
    for name, parameter in model.named_parameters():
        entry = state["optimizer"].get(name)
        if entry is not None:
            optimizer.state[parameter] = {
                key: value.clone() if value.dim() == 0 else parallel.placed_like(value, parameter).clone()
                for key, value in entry.items()
            }
    scheduler.load_state_dict({**scheduler.state_dict(), **state["scheduler"]})
    for group, rate in zip(optimizer.param_groups, state["learning_rates"], strict=True):
        group["lr"] = rate
