"""Losses that move the policy towards a teacher: reverse KL on sampled tokens, forward KL and JSD on the teacher's most likely tokens.

``TEACHER_LOSSES`` maps the names in a config to them. A sampled loss needs the teacher's log-probability of each sampled token. A loss of
kind ``top`` compares whole distributions, reduced to the teacher's ``K`` most likely tokens and one bin for all others. This reduction
keeps a KL non-negative, and a lower bound of the full KL (data-processing inequality).

There is no reverse KL on the teacher's top tokens alone: ``Σ q log(q/p)`` over these tokens falls when the policy ``q`` puts less
probability on all of them, so training drives the policy away from the teacher (docs/algorithms.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollwright.algorithms.losses import LOG_RATIO_LIMIT, kl_loss
from rollwright.config.recipes import TEACHER_LOSSES
from rollwright.config.teachers import DistillationConfig


@dataclass(frozen=True)
class TeacherLoss:
    """A row of ``TEACHER_LOSSES``.

    Attributes:
        kind: ``none``. ``advantage``: a term of the advantages. ``sampled``: a loss of the sampled tokens; like an advantage, it is correct
            only for tokens that the policy itself sampled. ``top``: a loss over the teacher's most likely tokens, for tokens of any origin.
        compute: called with log-probabilities of the policy and of the teacher, and the config section. They are those of the tokens
            ``[B, L]``, or those of the teacher's most likely tokens ``[B, L, K]`` if ``kind`` is ``top``. Returns ``[B, L]``.
    """

    kind: str
    compute: Callable[[Tensor, Tensor, DistillationConfig], Tensor]

    def __call__(self, logp: Tensor, teacher_logp: Tensor, config: DistillationConfig) -> Tensor:
        """Return the loss (or advantage) of each token, ``[B, L]``."""
        return self.compute(logp, teacher_logp, config)


def find_teacher_loss(name: str) -> TeacherLoss:
    """Return the row with a name. A function without a row of its own is a loss of kind ``top``.

    Raises:
        ConfigError: the name is unknown, or names a loss that is refused.
    """
    found = TEACHER_LOSSES.get(name)
    return found if isinstance(found, TeacherLoss) else TeacherLoss("top", found)


def reverse_kl_advantage(behaviour_logp_BL: Tensor, teacher_logp_BL: Tensor, config: DistillationConfig) -> Tensor:
    """Return ``log p - log b``, the advantage of each sampled token under teacher ``p`` and sampling policy ``b``.

    The policy gradient with this advantage descends the reverse KL to the teacher, counting for each token only its own term
    (Thinking Machines Lab, "On-Policy Distillation", 2025).
    """
    return teacher_logp_BL - behaviour_logp_BL


def sampled_kl(estimator: str) -> Callable[[Tensor, Tensor, DistillationConfig], Tensor]:
    """Return the reverse KL of sampled tokens as a loss, by Schulman's estimator ``k1``, ``k2`` or ``k3``; see ``losses.kl_loss``.

    The gradients of k1 and k2 are those of the reverse KL, ``(log q - log p) ∇ log q``. The gradient of k3 is ``(1 - p/q) ∇ log q``: on
    tokens sampled from the policy ``q``, its expectation is the gradient of the *forward* KL.
    """

    def loss(logp_BL: Tensor, teacher_logp_BL: Tensor, config: DistillationConfig) -> Tensor:
        return kl_loss(logp_BL, teacher_logp_BL, estimator)

    return loss


def forward_kl(logp_BLK: Tensor, teacher_logp_BLK: Tensor, config: DistillationConfig) -> Tensor:
    """Compute KL(teacher || policy) over the teacher's most likely tokens and a bin for all others, ``[B, L]`` in nats."""
    policy, teacher = with_tail(logp_BLK), with_tail(teacher_logp_BLK)
    return _kl(teacher, policy)


def jensen_shannon(logp_BLK: Tensor, teacher_logp_BLK: Tensor, config: DistillationConfig) -> Tensor:
    """Compute the generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, eq. 1) over the same bins as ``forward_kl``.

    With the mixture ``m = α p + (1 - α) q`` of teacher ``p`` and policy ``q``, it is ``α KL(p || m) + (1 - α) KL(q || m)`` for
    ``α = config.jsd_alpha``.
    """
    alpha = config.jsd_alpha
    policy, teacher = with_tail(logp_BLK), with_tail(teacher_logp_BLK)
    weights = torch.tensor([alpha, 1.0 - alpha], dtype=policy.dtype, device=policy.device).log()
    mixture = torch.logaddexp(teacher + weights[0], policy + weights[1])
    return alpha * _kl(teacher, mixture) + (1.0 - alpha) * _kl(policy, mixture)


def with_tail(logp_BLK: Tensor) -> Tensor:
    """Append the log-probability of all other tokens, ``log(1 - Σ p)``, to those of some tokens: ``[…, K]`` to ``[…, K + 1]``.

    If the others have a probability below the rounding of ``Σ p``, this rounding is used.
    """
    floor = 2 * torch.finfo(logp_BLK.dtype).eps
    rest = (1.0 - logp_BLK.exp().sum(-1, keepdim=True)).clamp(min=floor)
    return torch.cat([logp_BLK, rest.log()], -1)


def mass(logp_BLK: Tensor) -> Tensor:
    """Return the probability of all given tokens together, ``[B, L]``."""
    return logp_BLK.exp().sum(-1)


def _kl(logp_BLK: Tensor, other_logp_BLK: Tensor) -> Tensor:
    ratio_BLK = (logp_BLK - other_logp_BLK).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (logp_BLK.exp() * ratio_BLK).sum(-1)


#: No teacher.
NONE = TeacherLoss("none", lambda logp_BL, teacher_logp_BL, config: torch.zeros_like(logp_BL))
#: Per-token advantage; the policy loss of the recipe applies its ratio and clip to it.
ADVANTAGE = TeacherLoss("advantage", reverse_kl_advantage)
#: The reverse KL of sampled tokens as a term of the loss.
K1, K2, K3 = (TeacherLoss("sampled", sampled_kl(name)) for name in ("k1", "k2", "k3"))
#: Divergences over the teacher's most likely tokens.
FORWARD_KL, JSD = TeacherLoss("top", forward_kl), TeacherLoss("top", jensen_shannon)
