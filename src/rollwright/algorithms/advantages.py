"""Advantages from rewards, without a critic: the baseline comes from the rewards of the samples.

A row is one token sequence; a sample (one execution of a workflow) may have several rows. Every mean and deviation here weights a row by
one over the number of rows of its sample, so a sample of four rows does not count four times.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from rollwright.config.recipes import ADVANTAGE_ESTIMATORS
from rollwright.config.sections import PPOActorConfig
from rollwright.config.validation import refuse_wrong_arguments
from rollwright.errors import ConfigError, TrainingError

#: What an estimator keeps from one batch to the next, as JSON values; it is in the recovery checkpoint.
Memory = dict[str, Any]

#: Rewards, group ids and sample ids of rows, each ``[B]``, and the estimator's memory -> baseline and scale of each row.
Estimator = Callable[[Tensor, Tensor, Tensor, Memory], tuple[Tensor, Tensor]]

#: A deviation below this share of the largest absolute reward is rounding, not variance.
_NO_VARIANCE = 1e-6


def _segments(ids_B: Tensor) -> tuple[Tensor, int]:
    """Map arbitrary ids to consecutive numbers, and return these numbers and their count."""
    unique, index_B = torch.unique(ids_B, return_inverse=True)
    return index_B, int(unique.numel())


def _sum_by(values_B: Tensor, index_B: Tensor, count: int) -> Tensor:
    return values_B.new_zeros(count).index_add_(0, index_B, values_B)


def baseline_and_scale(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    sample_ids_B: Tensor,
    *,
    mean_level: str | None = "group",
    std_level: str | None = "group",
    leave_one_out: bool = False,
    std_after_mean: bool = False,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Compute the baseline that is subtracted from each row's reward, and the factor that scales the difference.

    Group mean and deviation are GRPO's (arXiv 2402.03300, section 4.1.2); the group mean alone is Dr. GRPO's (arXiv
    2503.20783); leave-one-out is RLOO's (arXiv 2402.14740). The group mean with the batch deviation of the rewards is Lite
    PPO's (arXiv 2508.08221); the group mean with the batch deviation of the rewards minus their group mean is
    REINFORCE++-baseline's (arXiv 2501.03262). Deviations are those of the population (no Bessel correction).

    A sample that nothing can be compared with gets scale 0, so its advantage is 0 and never its raw reward. This is a sample in a group
    of one or, if a deviation is used, in a group or batch without variance.

    Args:
        rewards_B: reward of each row.
        group_ids_B: rows with the same id are compared with each other.
        sample_ids_B: rows with the same id belong to one sample.
        mean_level: ``group``, ``batch``, or ``none`` (not centred).
        std_level: ``group``, ``batch``, or ``none`` (not scaled). Deviations are taken around the mean of the same level.
        leave_one_out: exclude a sample from the mean that it is compared with.
        std_after_mean: take the deviation of the rewards minus their baseline.
        eps: added to the deviation.

    Returns:
        Baseline and scale, both ``[B]`` float64.

    Raises:
        ConfigError: a level is unknown.
    """
    for name, level in (("mean_level", mean_level), ("std_level", std_level)):
        if level not in ("group", "batch", "none", None):
            raise ConfigError(f"adv_norm.{name} is {level!r}: choose one of group, batch, none.")
    rewards = rewards_B.double()
    sample_index_B, sample_count = _segments(sample_ids_B)
    weights = 1.0 / _sum_by(torch.ones_like(rewards), sample_index_B, sample_count)[sample_index_B]
    whole_batch_B = torch.zeros_like(group_ids_B)

    def moments(level: str, values_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean, deviation and number of samples of each row's group (or of the batch), all ``[B]``."""
        index_B, count = _segments(group_ids_B if level == "group" else whole_batch_B)
        samples = _sum_by(weights, index_B, count)
        mean_B = (_sum_by(weights * values_B, index_B, count) / samples)[index_B]
        variance = _sum_by(weights * (values_B - mean_B).square(), index_B, count) / samples
        return mean_B, variance.sqrt()[index_B], samples[index_B].round()

    baseline_B, scale_B = torch.zeros_like(rewards), torch.ones_like(rewards)
    if mean_level in ("group", "batch"):
        baseline_B, _, samples_B = moments(mean_level, rewards)
        if leave_one_out:
            own_B = _sum_by(weights * rewards, sample_index_B, sample_count)[sample_index_B]
            baseline_B = (baseline_B * samples_B - own_B) / (samples_B - 1).clamp(min=1)
        scale_B = (samples_B > 1).double()
    if std_level in ("group", "batch"):
        _, deviation_B, _ = moments(std_level, rewards - baseline_B if std_after_mean else rewards)
        scale_B = torch.where(deviation_B > _variance_floor(rewards), scale_B / (deviation_B + eps), torch.zeros_like(scale_B))
    return baseline_B, scale_B


def running_baselines(rewards: Sequence[float], average: float, decay: float) -> tuple[list[float], float]:
    """Take each reward's baseline from an exponential average, and update the average afterwards.

    The baseline of reward ``i`` depends only on the rewards before it, so it does not bias the gradient.

    Args:
        rewards: rewards in order.
        average: the average before the first of them.
        decay: weight of the old average; the new reward has ``1 - decay``.

    Returns:
        The baseline of each reward, and the average after the last of them.
    """
    baselines = []
    for reward in rewards:
        baselines.append(average)
        average = decay * average + (1 - decay) * reward
    return baselines, average


def role_average(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    sample_ids_B: Tensor,
    *,
    memory: Memory,
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95,
) -> tuple[Tensor, Tensor]:
    """Role-conditioned advantage estimation: reward minus the exponential average of the role's earlier rewards.

    SPIRAL, arXiv 2506.24119, section 3.2, with the average read before it is updated. Estimators are called for each (environment, role)
    with its own memory. Samples are taken in the order of their first rows; a sample counts once, with the mean reward of its rows.

    Args:
        rewards_B: reward of each row.
        group_ids_B: not used, because a game needs no group.
        sample_ids_B: rows with the same id belong to one sample.
        memory: ``average``, initially 0.
        decay: weight of the old average in each update.

    Returns:
        Baseline and scale (1), both ``[B]`` float64.
    """
    rewards, samples = rewards_B.double().tolist(), sample_ids_B.tolist()
    rows_of_sample: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        rows_of_sample.setdefault(sample, []).append(row)
    means = [math.fsum(rewards[row] for row in rows) / len(rows) for rows in rows_of_sample.values()]
    baselines, memory["average"] = running_baselines(means, memory.get("average", 0.0), decay)
    of_sample = dict(zip(rows_of_sample, baselines, strict=True))
    baseline_B = rewards_B.new_tensor([of_sample[sample] for sample in samples], dtype=torch.float64)
    return baseline_B, torch.ones_like(baseline_B)


def estimate_by_role(
    estimate: Estimator,
    rewards_B: Tensor,
    group_ids_B: Tensor,
    sample_ids_B: Tensor,
    role_ids_B: Tensor,
    trainable_B: Tensor,
    memories: dict[str, Memory],
) -> tuple[Tensor, Tensor]:
    """Estimate the rows of each role separately, so that no baseline or deviation of a group or batch covers two sides of a game.

    Args:
        estimate: result of ``find_estimator``.
        rewards_B, group_ids_B, sample_ids_B: see ``Estimator``.
        role_ids_B: the (environment, role) of each row.
        trainable_B: which rows belong to players that are trained. The others enter no comparison, and get baseline and scale 0.
        memories: the memory of each role, which the estimator updates.

    Returns:
        Baseline and scale, both ``[B]``.
    """
    baseline_B, scale_B = torch.zeros_like(rewards_B), torch.zeros_like(rewards_B)
    for role in role_ids_B[trainable_B].unique().tolist():
        rows = ((role_ids_B == role) & trainable_B).nonzero()[:, 0]
        memory = memories.setdefault(str(role), {})
        baseline_B[rows], scale_B[rows] = estimate(rewards_B[rows], group_ids_B[rows], sample_ids_B[rows], memory)
    return baseline_B, scale_B


def find_estimator(config: PPOActorConfig) -> Estimator:
    """Find the advantage estimator that ``config.adv_estimator`` names and bind its arguments.

    An estimator returns either the baseline and scale of each row, or the advantage of each row. An advantage is converted to scale 1 and
    a baseline (reward minus advantage). With token rewards, a token's advantage is then that of its row minus the rewards before the token.

    An estimator with a parameter ``memory`` gets a dict that it may change, and that it gets again with the next batch.

    Returns:
        A function of the shaped reward of each row (with ``token_rewards``, the total reward of the row), ``group_ids_B``,
        ``sample_ids_B`` and the memory. It returns baseline and scale, both ``[B]`` in the dtype of the rewards, and raises
        ``TrainingError`` if the estimator returned another shape.

    Raises:
        ConfigError: the estimator is unknown or does not accept the arguments.
    """
    name, arguments, norm = config.adv_estimator, dict(config.adv_estimator_kwargs), config.adv_norm
    if name == "normalised":
        if norm is None:
            return lambda rewards_B, group_ids_B, sample_ids_B, memory: (
                torch.zeros_like(rewards_B),
                torch.ones_like(rewards_B),
            )
        arguments = {each.name: getattr(norm, each.name) for each in fields(norm)} | arguments
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    has_memory = "memory" in inspect.signature(estimator).parameters
    try:
        inspect.signature(estimator).bind(None, None, None, **({"memory": None} if has_memory else {}), **arguments)
    except TypeError as error:
        raise ConfigError(
            f"actor.adv_estimator_kwargs has {', '.join(arguments) or 'no arguments'}, but of the estimator {name!r}: {error}."
        ) from None
    refuse_wrong_arguments(estimator, config.adv_estimator_kwargs, "actor.adv_estimator_kwargs")

    def estimate(rewards_B: Tensor, group_ids_B: Tensor, sample_ids_B: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        kept = {"memory": memory} if has_memory else {}
        result = estimator(rewards_B, group_ids_B, sample_ids_B, **kept, **arguments)
        parts: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
        if len(parts) not in (1, 2) or not all(isinstance(part, Tensor) and part.shape == rewards_B.shape for part in parts):
            shapes = [list(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
            raise TrainingError(
                f"the advantage estimator {name!r} returned {shapes}: return the advantage of each row, a tensor of "
                f"{list(rewards_B.shape)}, or a pair of such, baseline and scale."
            )
        if len(parts) == 1:
            return rewards_B - parts[0].to(rewards_B.dtype), torch.ones_like(rewards_B)
        return parts[0].to(rewards_B.dtype), parts[1].to(rewards_B.dtype)

    return estimate


def returns_to_go(token_rewards_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Sum the token rewards from each token to the end of its row, ``[B, L]``, without a discount."""
    masked_BL = token_rewards_BL * mask_BL
    return masked_BL.flip(-1).cumsum(-1).flip(-1)


def groups_without_variance(rewards_B: Tensor, group_ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """Count the groups whose rewards are all equal (they train nothing under a group baseline), and all groups."""
    index_B, count = _segments(group_ids_B)
    rewards = rewards_B.double()
    low = rewards.new_full((count,), torch.inf).scatter_reduce_(0, index_B, rewards, "amin")
    high = rewards.new_full((count,), -torch.inf).scatter_reduce_(0, index_B, rewards, "amax")
    return ((high - low) <= _variance_floor(rewards)).double().sum(), rewards.new_tensor(float(count))


def _variance_floor(rewards_B: Tensor) -> Tensor:
    return _NO_VARIANCE * rewards_B.abs().max().clamp(min=1e-12) if rewards_B.numel() else rewards_B.new_zeros(())
