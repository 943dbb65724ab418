"""Importance ratios: of tokens, turns and sequences, and the weight that corrects for who sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from rollwright.errors import ConfigError

#: Log-ratios are cut here before the exponential: e^20 is beyond every clip and every cap, and stays finite.
LOG_RATIO_LIMIT = 20.0


def turn_index(mask_BL: Tensor) -> Tensor:
    """The turn that each trained token belongs to: 1, 2, … for the runs of consecutive 1s of a row, 0 outside them."""
    mask_BL = mask_BL > 0
    starts_BL = mask_BL.clone()
    starts_BL[:, 1:] &= ~mask_BL[:, :-1]
    return starts_BL.long().cumsum(-1) * mask_BL


def importance_ratio(logp_BL: Tensor, old_logp_BL: Tensor, mask_BL: Tensor, level: str = "token") -> Tensor:
    """The ratio of two policies' probabilities at the level where importance is taken.

    Args:
        logp_BL: log-probabilities under the new policy.
        old_logp_BL: under the old one.
        mask_BL: 1 where a token trains.
        level: ``token``: of each token. ``sequence``: the geometric mean over the row, which is GSPO's length-normalised
            sequence ratio (arXiv 2507.18071, eq. 7). ``turn``: the geometric mean over each run of trained tokens.
            ``sequence_product``: the product over the row, the ratio of two whole sequences.

    Returns:
        ``[B, L]``; every token of a turn or row carries the same value, 1 where ``mask_BL`` is 0. The gradient at a token is
        that of its own log-probability times this value (GSPO-token, arXiv 2507.18071, section 4.3), so that advantages may differ
        between the tokens of a row. Where they are equal, so is the gradient of the mean.
    """
    mask_BL = mask_BL.to(logp_BL.dtype)
    own_BL = (logp_BL - old_logp_BL) * mask_BL
    if level == "token":
        return own_BL.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if level == "turn":
        index_BL = turn_index(mask_BL)
        turns = int(index_BL.max()) + 1 if index_BL.numel() else 1
        empty_BT = own_BL.new_zeros(own_BL.shape[0], turns)
        total_BT = empty_BT.scatter_add(1, index_BL, own_BL)
        count_BT = empty_BT.scatter_add(1, index_BL, mask_BL)
        pooled_BL = (total_BT / count_BT.clamp(min=1)).gather(1, index_BL)
    elif level in ("sequence", "sequence_product"):
        count_B = mask_BL.sum(-1).clamp(min=1) if level == "sequence" else 1.0
        pooled_BL = (own_BL.sum(-1) / count_B)[:, None]
    else:
        raise ConfigError(f"importance_level is {level!r}: choose one of token, turn, sequence, sequence_product.")
    pooled_BL = (pooled_BL * mask_BL).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return pooled_BL.exp() * (own_BL - own_BL.detach()).exp()


def behaviour_weight(
    prox_logp_BL: Tensor, behaviour_logp_BL: Tensor, mask_BL: Tensor, *, cap: float | None, mode: str, level: str = "token"
) -> tuple[Tensor, Tensor]:
    """The weight that corrects for who sampled: the proximal policy over the behaviour policy.

    It is the factor outside the clip of decoupled PPO (AReaL, arXiv 2505.24298, eq. 5), and, where the two policies
    differ only because an engine computes other numbers than the trainer, truncated (``clamp``) or masked (``mask``)
    importance sampling of that mismatch. No gradient flows through it.

    Args:
        prox_logp_BL: log-probabilities under the policy before this batch's first step.
        behaviour_logp_BL: log-probabilities at sampling.
        mask_BL: 1 where a token trains.
        cap: largest weight; None: no cap.
        mode: over the cap, ``mask`` gives the token no weight, ``clamp`` gives it the cap.
        level: see ``importance_ratio``. What verl and TRL call the sequence's weight is ``sequence_product``; ``sequence`` is
            its geometric mean over tokens.

    Returns:
        The weight ``[B, L]``, 0 where ``mask_BL`` is 0, and a bool ``[B, L]`` that is true where the cap took effect.
    """
    with torch.no_grad():
        weight_BL = importance_ratio(prox_logp_BL, behaviour_logp_BL, mask_BL, level) * mask_BL
        if cap is None:
            return weight_BL, torch.zeros_like(weight_BL, dtype=torch.bool)
        capped_BL = weight_BL > cap
        if mode == "mask":
            return weight_BL.masked_fill(capped_BL, 0.0), capped_BL
        if mode == "clamp":
            return weight_BL.clamp(max=cap), capped_BL
    raise ConfigError(f"behav_imp_weight_mode is {mode!r}: choose mask or clamp.")


def interpolated_prox_logp(logp_BL: Tensor, behaviour_logp_BL: Tensor, versions_BL: Tensor, current_version: int) -> Tensor:
    """The proximal policy's log-probabilities after a step on the batch, without a forward pass of its own.

    They are interpolated between behaviour and current by version as AReaL does it: ``log μ + α (log π - log μ)`` with
    ``α = (v - 1 - v_b) / (v - v_b)``, for the trainer's version ``v`` and the version ``v_b`` that sampled the token. A token of
    the current version, or of the one before, keeps its behaviour log-probability.

    Args:
        logp_BL: log-probabilities under the policy being optimised (detached here).
        behaviour_logp_BL: log-probabilities at sampling.
        versions_BL: version that sampled each token; -1 where none did.
        current_version: version of the trainer's weights before this update.
    """
    age_BL = (current_version - versions_BL).clamp(min=1).to(logp_BL.dtype)
    share_BL = (age_BL - 1) / age_BL
    return behaviour_logp_BL + share_BL * (logp_BL.detach() - behaviour_logp_BL)
