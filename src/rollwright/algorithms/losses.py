"""Policy losses per token, the importance ratios and KL estimates they use, and the weights that aggregate them.

A policy loss takes ``logp_BL`` (with gradient), ``old_logp_BL`` (the proximal policy, the denominator of the ratio), ``advantages_BL``
and ``mask_BL``. It returns a ``PolicyLoss`` or only its values. A loss that corrects for the behaviour policy itself also takes
``behaviour_logp_BL``, the log-probabilities at sampling, which differ from ``old_logp_BL`` if the trainer recomputes the latter.
``POLICY_LOSSES`` maps the names in a config to losses. The loss of a batch is ``(weights_BL * values_BL).sum()`` with the weights of
``aggregation_weights``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from rollwright.config.recipes import KL_ESTIMATORS, POLICY_LOSSES, was_set
from rollwright.config.sections import PPOActorConfig
from rollwright.config.validation import refuse_wrong_arguments
from rollwright.errors import ConfigError
from rollwright.tracking.logging import getLogger

logger = getLogger("algorithms")

#: Ranges of arguments; ``policy_loss_kwargs`` are checked against the annotations of the loss.
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]

#: Parameter of losses that correct for the behaviour policy themselves.
_BEHAVIOUR = "behaviour_logp_BL"

#: Loss parameters that have their own config key: parameter -> key.
_FROM_CONFIG = {"level": "importance_level", "eps_clip": "eps_clip", "eps_clip_higher": "eps_clip_higher", "c_clip": "c_clip"}


# -- which loss --------------------------------------------------------------------------------------------------------


def find_policy_loss(config: PPOActorConfig) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], PolicyLoss]:
    """Find the loss that ``config`` names and bind its arguments.

    The parameters ``level``, ``eps_clip``, ``eps_clip_higher`` and ``c_clip`` of a loss are set from config keys of the same name
    (``importance_level`` for ``level``), all others from ``policy_loss_kwargs``.

    Returns:
        A function of ``logp_BL, old_logp_BL, advantages_BL, mask_BL, behaviour_logp_BL``; the last one is passed on only to losses with
        this parameter.

    Raises:
        ConfigError: the loss is unknown (the message lists the names), does not accept an argument, or corrects for the behaviour policy
            while ``use_decoupled_loss`` does so too; or an argument has the wrong type or range.
    """
    for key, message in unread_keys(config, shifted=True):  # the section does not say whether engines shift log-probabilities
        logger.warning("actor.%s %s", key, message)
    return _with_arguments(config)


def _with_arguments(config: PPOActorConfig) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], PolicyLoss]:
    name, arguments = config.policy_loss, dict(config.policy_loss_kwargs)
    loss = POLICY_LOSSES.get(name)
    parameters = list(inspect.signature(loss).parameters.values())[4:]
    known = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    corrects = _BEHAVIOUR in known
    known.discard(_BEHAVIOUR)
    if corrects and config.use_decoupled_loss:
        raise ConfigError(
            f"actor.use_decoupled_loss weights tokens by the policy that sampled them, and so does the loss {name!r}: they would be "
            "weighted twice. Set use_decoupled_loss to false, or use the loss clip."
        )
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_all and (unknown := sorted(set(arguments) - (known - set(_FROM_CONFIG)))):
        allowed = ", ".join(sorted(known - set(_FROM_CONFIG))) or "none"
        raise ConfigError(f"actor.policy_loss_kwargs has {unknown}, which the loss {name!r} does not take: it takes {allowed}.")
    refuse_wrong_arguments(loss, arguments, "actor.policy_loss_kwargs")
    arguments = {parameter: getattr(config, key) for parameter, key in _FROM_CONFIG.items() if parameter in known} | arguments

    def policy_loss(
        logp_BL: Tensor, old_logp_BL: Tensor, advantages_BL: Tensor, mask_BL: Tensor, behaviour_logp_BL: Tensor
    ) -> PolicyLoss:
        behaviour = {_BEHAVIOUR: behaviour_logp_BL} if corrects else {}
        result = loss(logp_BL, old_logp_BL, advantages_BL, mask_BL, **arguments, **behaviour)
        if isinstance(result, PolicyLoss):
            return result
        if not isinstance(result, Tensor) or result.shape != logp_BL.shape:
            found = f"a tensor of {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise ConfigError(
                f"the policy loss {getattr(loss, '__qualname__', loss)} returned {found}; return a PolicyLoss, or a loss for each "
                f"token: {list(logp_BL.shape)}, not summed."
            )
        ratio_BL = importance_ratio(logp_BL, old_logp_BL, mask_BL).detach()
        return PolicyLoss(result, ratio_BL, torch.zeros_like(mask_BL, dtype=torch.bool))

    return policy_loss


def unread_keys(config: PPOActorConfig, *, shifted: bool = False) -> list[tuple[str, str]]:
    """Return the keys that are set but that the loss of ``config`` does not read, each with a message.

    Args:
        config: the ``actor`` section.
        shifted: True if engines may return log-probabilities that differ from the policy's and that the trainer therefore replaces.
    """
    parameters = inspect.signature(POLICY_LOSSES.get(config.policy_loss)).parameters
    read = ", ".join(key for parameter, key in _FROM_CONFIG.items() if parameter in parameters) or "none of its kind"
    message = f"is set, but the loss {config.policy_loss!r} does not read it: it reads {read}; take it out"
    found = [(key, message) for parameter, key in _FROM_CONFIG.items() if parameter not in parameters and was_set(config, key)]
    if config.recompute_logprob and not (config.use_decoupled_loss or shifted or found) and not reads_anchor(config):
        compared = f"the loss {config.policy_loss!r} compares with the log-probabilities at sampling; take it out"
        found.append(("recompute_logprob", f"is set, but not read: {compared}"))
    return found


def reads_anchor(config: PPOActorConfig) -> bool:
    """Return True if the loss of ``config`` depends on the log-probabilities that the trainer recomputes, as tested on a few tokens."""
    loss = _with_arguments(config)
    generator = torch.Generator().manual_seed(1)
    logp_BL, behaviour_BL, *anchors = (-3.0 * torch.rand(4, 6, generator=generator) for _ in range(4))
    advantages_BL, mask_BL = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]).expand(4, 6), torch.ones(4, 6)
    values = []
    for anchor_BL in anchors:
        current_BL = logp_BL.clone().requires_grad_()
        value_BL = loss(current_BL, anchor_BL, advantages_BL, mask_BL, behaviour_BL).values
        gradient_BL = torch.autograd.grad(value_BL.sum(), current_BL)[0] if value_BL.requires_grad else value_BL
        values.append(torch.stack([value_BL.detach(), gradient_BL]))
    return not torch.equal(*values)


@dataclass
class PolicyLoss:
    """The loss of each token, with its importance ratio and whether it was clipped."""

    values: Tensor  # [B, L]
    ratio: Tensor  # [B, L], detached
    clipped: Tensor  # [B, L] bool: the clip (or the cap) determined the value


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
    """Compute PPO's clipped surrogate (arXiv 1707.06347, eq. 7), with DAPO's separate upper clip and the dual clip.

    With ``level="sequence"`` it is GSPO (arXiv 2507.18071, eq. 5), or GSPO-token (section 4.3) if advantages are per token.
    ``level="turn"`` is the same over the tokens of a turn. With ``level="sequence_product"`` and leave-one-out advantages it is RLOO.

    Args:
        level: level of the ratio, see ``importance_ratio``.
        eps_clip: lower clip, ``1 - eps_clip``.
        eps_clip_higher: upper clip, ``1 + eps_clip_higher`` (arXiv 2503.14476, eq. 10). If None, ``eps_clip``.
        c_clip: upper bound ``c_clip · |A|`` of the loss for negative advantages (dual-clip PPO, arXiv 1912.09729, eq. 5). If None, there
            is no bound.
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
    weight_low: NotNegative = 0.0,
    weight_high: Positive = 5.0,
) -> PolicyLoss:
    """Compute the CISPO loss: it clips the importance weight, not the update, so every token keeps a gradient (arXiv 2506.13585, eq. 4).

    Args:
        weight_low: smallest weight (the paper sets no lower bound).
        weight_high: largest weight, the paper's ``1 + ε_high``.
    """
    if weight_low > weight_high:
        raise ConfigError(f"actor.policy_loss_kwargs: weight_low is {weight_low}, more than weight_high ({weight_high}).")
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
    tau_positive: Positive = 1.0,
    tau_negative: Positive = 1.05,
) -> PolicyLoss:
    """Compute the SAPO loss: a smooth gate ``4/τ · σ(τ (r - 1))`` replaces the hard clip (arXiv 2511.20347, eq. 5 and 6).

    Args:
        tau_positive: sharpness of the gate for positive advantages.
        tau_negative: sharpness for all other advantages. It is larger, because their gradients spread over the whole vocabulary.
    """
    ratio_BL = importance_ratio(logp_BL, old_logp_BL, mask_BL, level)
    tau_BL = torch.where(advantages_BL > 0, tau_positive, tau_negative).to(ratio_BL.dtype)
    gate_BL = torch.sigmoid(tau_BL * (ratio_BL - 1.0)) * 4.0 / tau_BL
    return PolicyLoss(-gate_BL * advantages_BL, ratio_BL.detach(), torch.zeros_like(mask_BL, dtype=torch.bool))


def reinforce_loss(
    logp_BL: Tensor,
    old_logp_BL: Tensor,
    advantages_BL: Tensor,
    mask_BL: Tensor,
    *,
    behaviour_logp_BL: Tensor | None = None,
    level: str = "token",
    weight_high: Positive | None = 2.0,
) -> PolicyLoss:
    """Compute the REINFORCE loss ``-A log π`` (Williams, 1992), weighted by the truncated ratio ``π / μ`` to the policy that sampled.

    On policy the weight is 1. After the first of several steps on a batch, and on stale samples, the weight makes the gradient that of the
    current policy (truncated importance sampling; IMPALA, arXiv 1802.01561, section 4). Without it, the probability of bad samples would
    decrease without bound.

    Args:
        behaviour_logp_BL: log-probabilities at sampling. If None, ``old_logp_BL``.
        level: level of the weight, see ``importance_ratio``.
        weight_high: largest weight. If None, all weights are 1, as in Williams' paper.
    """
    behaviour_logp_BL = old_logp_BL if behaviour_logp_BL is None else behaviour_logp_BL
    ratio_BL = importance_ratio(logp_BL, behaviour_logp_BL, mask_BL, level).detach()
    weight_BL = torch.ones_like(ratio_BL) if weight_high is None else ratio_BL.clamp(max=weight_high)
    over_BL = torch.zeros_like(mask_BL) if weight_high is None else ratio_BL > weight_high
    return PolicyLoss(-weight_BL * advantages_BL * logp_BL, ratio_BL, (over_BL * mask_BL) > 0)


def opmd_loss(
    logp_BL: Tensor,
    old_logp_BL: Tensor,
    advantages_BL: Tensor,
    mask_BL: Tensor,
    *,
    behaviour_logp_BL: Tensor | None = None,
    level: str = "token",
    weight_high: Positive | None = 2.0,
    tau: NotNegative = 1.0,
) -> PolicyLoss:
    """Compute the loss of online policy mirror descent in its simple form, ``-A log π / (1 + τ)`` (arXiv 2505.17826, appendix A).

    Args:
        behaviour_logp_BL, level, weight_high: see ``reinforce_loss``. The paper uses no weights (``weight_high=None``).
        tau: strength of the pull towards the current policy.
    """
    result = reinforce_loss(
        logp_BL,
        old_logp_BL,
        advantages_BL,
        mask_BL,
        behaviour_logp_BL=behaviour_logp_BL,
        level=level,
        weight_high=weight_high,
    )
    result.values = result.values / (1.0 + tau)
    return result


def topr_loss(
    logp_BL: Tensor,
    old_logp_BL: Tensor,
    advantages_BL: Tensor,
    mask_BL: Tensor,
    *,
    behaviour_logp_BL: Tensor | None = None,
) -> PolicyLoss:
    """Compute the loss of tapered off-policy REINFORCE (arXiv 2503.14286, eq. 8): good samples have full weight, bad ones less.

    Tokens with a negative advantage are weighted by the whole row's ratio ``π(y) / μ(y)``, clipped to [0, 1]; all others have weight 1. As
    in the paper, the ratio is the product over the row's tokens, relative to the behaviour policy.

    Args:
        behaviour_logp_BL: log-probabilities at sampling. If None, ``old_logp_BL``.
    """
    behaviour_logp_BL = old_logp_BL if behaviour_logp_BL is None else behaviour_logp_BL
    ratio_BL = importance_ratio(logp_BL, behaviour_logp_BL, mask_BL, "sequence_product").detach()
    tapered_BL = (advantages_BL < 0) & (mask_BL > 0)
    weight_BL = torch.where(tapered_BL, ratio_BL.clamp(max=1.0), torch.ones_like(ratio_BL))
    return PolicyLoss(-weight_BL * advantages_BL * logp_BL, ratio_BL, tapered_BL & (ratio_BL > 1.0))


def sft_loss(logp_BL: Tensor) -> Tensor:
    """Return the negative log-likelihood of each token, ``[B, L]``."""
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
    """Compute the loss of direct preference optimisation (arXiv 2305.18290, eq. 7), with the label smoothing of conservative DPO.

    Args:
        chosen_logp_B: log-probability of each whole chosen completion under the policy (a sum over its tokens).
        rejected_logp_B: log-probability of each rejected completion under the policy.
        ref_chosen_logp_B: log-probability of each chosen completion under the reference.
        ref_rejected_logp_B: log-probability of each rejected completion under the reference.
        beta: strength of the pull towards the reference.
        label_smoothing: assumed share of pairs with swapped labels.

    Returns:
        The loss of each pair ``[B]``, and the reward margin ``[B]`` (detached).
    """
    margin_B = beta * ((chosen_logp_B - ref_chosen_logp_B) - (rejected_logp_B - ref_rejected_logp_B))
    loss_B = -(1.0 - label_smoothing) * F.logsigmoid(margin_B) - label_smoothing * F.logsigmoid(-margin_B)
    return loss_B, margin_B.detach()


# -- aggregation -------------------------------------------------------------------------------------------------------


def aggregation_weights(
    mask_BL: Tensor, how: str, *, constant: float = 1.0, reduce: Callable[[Tensor], Tensor] = lambda total: total
) -> Tensor:
    """Compute the weight of every token in the loss, including the denominator of the whole batch.

    The weights are computed before the batch is divided into micro-batches, and the denominator covers all ranks (see ``reduce``), so
    dividing the batch cannot change the gradient.

    Args:
        mask_BL: 1 where a token trains.
        how: ``token``: the mean over all tokens of the batch (DAPO, arXiv 2503.14476, eq. 8). ``row``: the mean over rows
            of each row's mean (GRPO, arXiv 2402.03300, eq. 3); rows without a trained token are not counted.
            ``constant``: the sum over tokens divided by ``constant`` times the number of rows (Dr. GRPO, arXiv
            2503.20783), so tokens of long answers do not weigh less.
        constant: number of tokens that a row counts for if ``how`` is ``constant``.
        reduce: sums a scalar over the ranks that share the batch.

    Returns:
        ``[B, L]`` float, 0 where ``mask_BL`` is 0. If no token trains, all weights are 0.
    """
    mask_BL = mask_BL.to(torch.get_default_dtype() if not mask_BL.is_floating_point() else mask_BL.dtype)
    tokens_B = mask_BL.sum(-1)
    if how == "token":
        return mask_BL / reduce(tokens_B.sum()).clamp(min=1)
    if how == "row":
        rows = reduce((tokens_B > 0).sum().to(mask_BL.dtype)).clamp(min=1)
        return mask_BL / tokens_B.clamp(min=1)[:, None] / rows
    if how == "constant":
        rows = reduce(torch.tensor(float(mask_BL.shape[0]), dtype=mask_BL.dtype, device=mask_BL.device)).clamp(min=1)
        return mask_BL / (constant * rows)
    raise ConfigError(f"loss_aggregation is {how!r}: choose one of token, row, constant.")


#: Limit of log-ratios before the exponential: e^20 is beyond every clip and cap, and finite.
LOG_RATIO_LIMIT = 20.0


def turn_index(mask_BL: Tensor) -> Tensor:
    """Number the turns of each row: 1, 2, … for its stretches of consecutive trained tokens, 0 at all other tokens."""
    mask_BL = mask_BL > 0
    starts_BL = mask_BL.clone()
    starts_BL[:, 1:] &= ~mask_BL[:, :-1]
    return starts_BL.long().cumsum(-1) * mask_BL


def importance_ratio(logp_BL: Tensor, old_logp_BL: Tensor, mask_BL: Tensor, level: str = "token") -> Tensor:
    """Compute the ratio of two policies' probabilities at a given level.

    Args:
        logp_BL: log-probabilities under the new policy.
        old_logp_BL: log-probabilities under the old policy.
        mask_BL: 1 where a token trains.
        level: ``token``: the ratio of each token. ``sequence``: the geometric mean over the row, which is GSPO's length-normalised
            sequence ratio (arXiv 2507.18071, eq. 7). ``turn``: the geometric mean over each stretch of consecutive trained tokens.
            ``sequence_product``: the product over the row, which is the ratio of whole sequences.

    Returns:
        ``[B, L]``, with one value for all tokens of a turn or row, and 1 where ``mask_BL`` is 0. The gradient at a token is the gradient
        of its own log-probability times this value (GSPO-token, arXiv 2507.18071, section 4.3), so advantages may differ between the
        tokens of a row. If the advantages are equal, this is the gradient of the mean.
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
    """Compute the importance weight of the proximal policy over the behaviour policy.

    This is the factor outside the clip of decoupled PPO (arXiv 2505.24298, eq. 5). If the two policies differ only because engine and
    trainer compute different numbers, the weight is truncated (``clamp``) or masked (``mask``) importance sampling that corrects this
    mismatch. No gradient flows through the weight.

    Args:
        prox_logp_BL: log-probabilities under the policy before this batch's first step.
        behaviour_logp_BL: log-probabilities at sampling.
        mask_BL: 1 where a token trains.
        cap: largest weight. If None, weights are not capped.
        mode: above the cap, ``mask`` sets a weight to 0 and ``clamp`` sets it to the cap.
        level: see ``importance_ratio``. ``sequence_product`` is the weight of the whole sequence; ``sequence`` is its geometric mean over
            tokens.

    Returns:
        The weight ``[B, L]``, 0 where ``mask_BL`` is 0, and a bool mask ``[B, L]`` of the tokens above the cap.
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
    """Approximate the log-probabilities of the proximal policy after a step on the batch, without an extra forward pass.

    They are interpolated between the behaviour policy and the current policy by version: ``log μ + α (log π - log μ)`` with
    ``α = (v - 1 - v_b) / (v - v_b)``, for the trainer's version ``v`` and the version ``v_b`` that sampled the token. A token of
    the current version, or of the one before, keeps its behaviour log-probability.

    Args:
        logp_BL: log-probabilities under the policy being optimised (detached here).
        behaviour_logp_BL: log-probabilities at sampling.
        versions_BL: version that sampled each token; -1 for other tokens.
        current_version: version of the trainer's weights before this update.
    """
    age_BL = (current_version - versions_BL).clamp(min=1).to(logp_BL.dtype)
    share_BL = (age_BL - 1) / age_BL
    return behaviour_logp_BL + share_BL * (logp_BL.detach() - behaviour_logp_BL)


# -- KL to a reference -------------------------------------------------------------------------------------------------
# Estimators of KL(p || q) for x sampled from p, with r = q(x) / p(x): Schulman, "Approximating KL Divergence" (2020).


def k1(logp_BL: Tensor, ref_logp_BL: Tensor) -> Tensor:
    """Estimate KL(p || q) by ``-log r`` with ``r = q(x) / p(x)``: unbiased, noisy."""
    return logp_BL - ref_logp_BL


def k2(logp_BL: Tensor, ref_logp_BL: Tensor) -> Tensor:
    """Estimate KL(p || q) by ``(log r)² / 2`` with ``r = q(x) / p(x)``: low variance, small bias."""
    return 0.5 * (ref_logp_BL - logp_BL).square()


def k3(logp_BL: Tensor, ref_logp_BL: Tensor) -> Tensor:
    """Estimate KL(p || q) by ``(r - 1) - log r`` with ``r = q(x) / p(x)``: unbiased, never negative."""
    log_ratio_BL = ref_logp_BL - logp_BL
    return torch.expm1(log_ratio_BL.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - log_ratio_BL


def kl_estimate(logp_BL: Tensor, ref_logp_BL: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) for each token sampled from the policy.

    Args:
        logp_BL: log-probabilities of the tokens under the policy.
        ref_logp_BL: log-probabilities of the tokens under the reference.
        estimator: ``k1``, ``k2``, ``k3``, or a name or import path of ``KL_ESTIMATORS``.

    Returns:
        ``[B, L]``, in nats.

    Raises:
        ConfigError: the estimator is unknown.
    """
    return KL_ESTIMATORS.get(estimator)(logp_BL, ref_logp_BL)


def kl_loss(logp_BL: Tensor, ref_logp_BL: Tensor, estimator: str) -> Tensor:
    """Compute the KL term of a loss: its value is the estimate, and its gradient lowers the KL.

    The derivative of k1 itself is the score function, whose mean is zero, so k1 would be pure noise as a loss. For k1, the value is
    therefore k1 and the gradient is ``k1 · ∇ log p``. This gradient equals that of k2 and, on on-policy samples, is an unbiased estimate
    of the gradient of KL(policy || reference) (arXiv 2510.01555). That of k3 is, on on-policy samples, one of KL(reference || policy).
    """
    estimate_BL = kl_estimate(logp_BL, ref_logp_BL, estimator)
    if estimator != "k1":
        return estimate_BL
    estimate_BL = estimate_BL.detach()
    return estimate_BL + estimate_BL * (logp_BL - logp_BL.detach())
