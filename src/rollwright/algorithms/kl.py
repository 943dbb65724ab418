"""KL divergence to a reference, estimated from tokens that the policy sampled.

The estimators of KL(p || q) for x sampled from p, with r = q(x) / p(x), are those of Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollwright.algorithms.losses import LOG_RATIO_LIMIT
from rollwright.config.recipes import KL_ESTIMATORS


def k1(logp_BL: Tensor, ref_logp_BL: Tensor) -> Tensor:
    """``-log r``: unbiased, noisy."""
    return logp_BL - ref_logp_BL


def k2(logp_BL: Tensor, ref_logp_BL: Tensor) -> Tensor:
    """``(log r)² / 2``: low variance, small bias."""
    return 0.5 * (ref_logp_BL - logp_BL).square()


def k3(logp_BL: Tensor, ref_logp_BL: Tensor) -> Tensor:
    """``(r - 1) - log r``: unbiased, never negative."""
    log_ratio_BL = ref_logp_BL - logp_BL
    return torch.expm1(log_ratio_BL.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - log_ratio_BL


def kl_estimate(logp_BL: Tensor, ref_logp_BL: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) for each token sampled from the policy.

    Args:
        logp_BL: log-probabilities of the tokens under the policy.
        ref_logp_BL: the same under the reference.
        estimator: ``k1``, ``k2``, ``k3``, or a name or import path of ``KL_ESTIMATORS``.

    Returns:
        ``[B, L]``, in nats.

    Raises:
        ConfigError: the estimator is unknown.
    """
    return KL_ESTIMATORS.get(estimator)(logp_BL, ref_logp_BL)


def kl_loss(logp_BL: Tensor, ref_logp_BL: Tensor, estimator: str) -> Tensor:
    """The KL term of a loss: the estimate as its value, and a gradient that lowers the KL.

    The derivative of k1 itself is the score function, whose mean is zero, so as a loss it would be pure noise. The value is therefore
    k1 and the gradient ``k1 · ∇ log p``, which equals the gradient of k2 and on on-policy samples is an unbiased estimate of the
    gradient of KL(policy || reference).
    """
    estimate_BL = kl_estimate(logp_BL, ref_logp_BL, estimator)
    if estimator != "k1":
        return estimate_BL
    estimate_BL = estimate_BL.detach()
    return estimate_BL + estimate_BL * (logp_BL - logp_BL.detach())
