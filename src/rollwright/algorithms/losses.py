"""Losses per token. Each is to be weighted by ``aggregation_weights`` and summed.

A policy loss takes log-probabilities ``logp_BL`` (with gradient), ``old_logp_BL`` (the policy that the ratio is taken
against), ``advantages_BL`` and ``mask_BL``, and returns a ``PolicyLoss``. ``POLICY_LOSSES`` names them for the config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rollwright.algorithms.ratios import LOG_RATIO_LIMIT, importance_ratio
from rollwright.errors import ConfigError


@dataclass
class PolicyLoss:
    """A loss for each token, and what happened to its ratio."""

    values: Tensor  # [B, L]
    ratio: Tensor  # [B, L], detached
    clipped: Tensor  # [B, L] bool: the clip (or the cap) decided the value


def clip_loss(
    logp_BL: Tensor,
    old_logp_BL: Tensor,
    advantages_BL: Tensor,
    mask_BL: Tensor,
    *,
    level: str = "token",
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), with DAPO's separate upper clip and the dual clip.

    With ``level="sequence"`` it is GSPO (arXiv 2507.18071, eq. 5), with ``level="turn"`` the same over a turn's tokens.

    Args:
        level: where the ratio is taken.
        eps_clip: lower clip, ``1 - eps_clip``.
        eps_clip_higher: upper clip, ``1 + eps_clip_higher``; None: as the lower (arXiv 2503.14476, eq. 10).
        c_clip: bound ``c_clip · |A|`` of the loss for negative advantages (dual-clip PPO, arXiv 1912.09729, eq. 5).
    """
    ratio_BL = importance_ratio(logp_BL, old_logp_BL, mask_BL, level)
    upper = eps_clip if eps_clip_higher is None else eps_clip_higher
    free_BL = -advantages_BL * ratio_BL
    bound_BL = -advantages_BL * ratio_BL.clamp(1.0 - eps_clip, 1.0 + upper)
    values_BL = torch.maximum(free_BL, bound_BL)
    clipped_BL = bound_BL > free_BL
    if c_clip is not None:
        dual_BL = -advantages_BL * c_clip
        over_BL = (advantages_BL < 0) & (values_BL > dual_BL)
        values_BL = torch.where(over_BL, dual_BL, values_BL)
        clipped_BL = clipped_BL | over_BL
    return PolicyLoss(values_BL, ratio_BL.detach(), clipped_BL & (mask_BL > 0))


def cispo_loss(
    logp_BL: Tensor,
    old_logp_BL: Tensor,
    advantages_BL: Tensor,
    mask_BL: Tensor,
    *,
    level: str = "token",
    weight_low: float = 0.0,
    weight_high: float = 5.0,
) -> PolicyLoss:
    """CISPO: the importance weight is clipped, not the update, so every token keeps a gradient (arXiv 2506.13585, eq. 4).

    Args:
        weight_low: smallest weight (the paper sets no lower bound).
        weight_high: largest weight, the paper's ``1 + ε_high``.
    """
    ratio_BL = importance_ratio(logp_BL, old_logp_BL, mask_BL, level).detach()
    weight_BL = ratio_BL.clamp(weight_low, weight_high)
    return PolicyLoss(-weight_BL * advantages_BL * logp_BL, ratio_BL, (weight_BL != ratio_BL) & (mask_BL > 0))


def sapo_loss(
    logp_BL: Tensor,
    old_logp_BL: Tensor,
    advantages_BL: Tensor,
    mask_BL: Tensor,
    *,
    level: str = "token",
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> PolicyLoss:
    """SAPO: a smooth gate ``4/τ · σ(τ (r - 1))`` in the place of the hard clip (arXiv 2511.20347, eq. 5 and 6).

    Args:
        tau_positive: sharpness of the gate for positive advantages.
        tau_negative: sharpness for the others; larger, because their gradients spread over the whole vocabulary.
    """
    ratio_BL = importance_ratio(logp_BL, old_logp_BL, mask_BL, level)
    tau_BL = torch.where(advantages_BL > 0, tau_positive, tau_negative).to(ratio_BL.dtype)
    gate_BL = torch.sigmoid(tau_BL * (ratio_BL - 1.0)) * 4.0 / tau_BL
    return PolicyLoss(-gate_BL * advantages_BL, ratio_BL.detach(), torch.zeros_like(mask_BL, dtype=torch.bool))


def reinforce_loss(
    logp_BL: Tensor, old_logp_BL: Tensor, advantages_BL: Tensor, mask_BL: Tensor, *, level: str = "token"
) -> PolicyLoss:
    """REINFORCE: ``-A log π``, without a ratio (Williams, 1992). ``level`` only shapes the reported ratio."""
    ratio_BL = importance_ratio(logp_BL, old_logp_BL, mask_BL, level).detach()
    return PolicyLoss(-advantages_BL * logp_BL, ratio_BL, torch.zeros_like(mask_BL, dtype=torch.bool))


def opmd_loss(
    logp_BL: Tensor, old_logp_BL: Tensor, advantages_BL: Tensor, mask_BL: Tensor, *, level: str = "token", tau: float = 1.0
) -> PolicyLoss:
    """Online policy mirror descent in its simple form: ``-A log π / (1 + τ)`` (Trinity-RFT, arXiv 2505.17826, appendix A).

    It needs no importance ratio, also off policy; ``τ`` is the strength of the pull towards the current policy.
    """
    result = reinforce_loss(logp_BL, old_logp_BL, advantages_BL, mask_BL, level=level)
    result.values = result.values / (1.0 + tau)
    return result


def topr_loss(
    logp_BL: Tensor, old_logp_BL: Tensor, advantages_BL: Tensor, mask_BL: Tensor, *, level: str = "token"
) -> PolicyLoss:
    """Tapered off-policy REINFORCE (arXiv 2503.14286, eq. 8): full weight on what was good, tapered on what was bad.

    Rows of positive advantage are weighted by 1; the others by the whole row's ratio ``π(y) / μ(y)``, cut to [0, 1].
    ``level`` is not used: the paper's ratio is that of the whole sequence, not length-normalised.
    """
    del level
    total_B = ((logp_BL - old_logp_BL) * mask_BL).sum(-1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_BL = total_B.exp().detach()[:, None].expand_as(logp_BL)
    tapered_BL = (advantages_BL < 0) & (mask_BL > 0)
    weight_BL = torch.where(tapered_BL, ratio_BL.clamp(max=1.0), torch.ones_like(ratio_BL))
    return PolicyLoss(-weight_BL * advantages_BL * logp_BL, ratio_BL, tapered_BL & (ratio_BL > 1.0))


POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "clip": clip_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "reinforce": reinforce_loss,
    "opmd": opmd_loss,
    "topr": topr_loss,
}


def check_policy_loss(name: str, arguments: dict[str, object]) -> None:
    """Refuse a loss that does not exist, or arguments that it does not take.

    Raises:
        ConfigError: with the names that there are.
    """
    if name not in POLICY_LOSSES:
        raise ConfigError(f"actor.policy_loss is {name!r}: choose one of {', '.join(POLICY_LOSSES)}.")
    if name == "clip":
        allowed: set[str] = set()  # the clip has config keys of its own
    else:
        allowed = {p for p, kind in inspect.signature(POLICY_LOSSES[name]).parameters.items() if kind.kind is kind.KEYWORD_ONLY}
        allowed -= {"level"}
    unknown = sorted(set(arguments) - allowed)
    if unknown:
        known = ", ".join(sorted(allowed)) or "none"
        raise ConfigError(f"actor.policy_loss_kwargs has {unknown}, which the loss {name!r} does not take: it takes {known}.")


def sft_loss(logp_BL: Tensor) -> Tensor:
    """Negative log-likelihood of each token, ``[B, L]``."""
    return -logp_BL


def dpo_loss(
    chosen_logp_B: Tensor,
    rejected_logp_B: Tensor,
    ref_chosen_logp_B: Tensor,
    ref_rejected_logp_B: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Direct preference optimisation (arXiv 2305.18290, eq. 7), with the label smoothing of conservative DPO.

    Args:
        chosen_logp_B: log-probability of each whole chosen completion under the policy (a sum over its tokens).
        rejected_logp_B: the same for the rejected one.
        ref_chosen_logp_B: under the reference.
        ref_rejected_logp_B: under the reference.
        beta: strength of the pull towards the reference.
        label_smoothing: share of preferences assumed to be the wrong way round.

    Returns:
        The loss of each pair ``[B]``, and the reward margin ``[B]`` (detached).
    """
    margin_B = beta * ((chosen_logp_B - ref_chosen_logp_B) - (rejected_logp_B - ref_rejected_logp_B))
    loss_B = -(1.0 - label_smoothing) * F.logsigmoid(margin_B) - label_smoothing * F.logsigmoid(-margin_B)
    return loss_B, margin_B.detach()
