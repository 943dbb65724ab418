"""Advantages from the values of a critic: generalised advantage estimation over trained tokens, and the critic's loss.

``values_BL`` is aligned like ``logprobs``: the value at a token is that of the state before the token is sampled. Only trained tokens
(``mask_BL`` is 1) are actions. Between an action and the next one, a tool may add any number of tokens: these have no reward and no
temporal difference, and nothing is discounted over them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from rollwright.config.recipes import ADVANTAGE_ESTIMATORS
from rollwright.config.sections import PPOActorConfig
from rollwright.config.validation import refuse_wrong_arguments
from rollwright.errors import ConfigError
from rollwright.registry import why_not_called

#: Ranges of arguments; ``adv_estimator_kwargs`` are checked against the annotations of ``gae_advantages``.
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]

#: Sums a tensor over ranks.
Reduce = Callable[[Tensor], Tensor]

#: Rewards, values and mask of tokens ``[B, L]``, value after each row ``[B]``, sum over ranks -> advantages and returns ``[B, L]``.
ValueEstimator = Callable[[Tensor, Tensor, Tensor, Tensor, Reduce], tuple[Tensor, Tensor]]


def find_value_estimator(config: PPOActorConfig) -> ValueEstimator:
    """Bind the arguments of ``adv_estimator: gae``.

    Raises:
        ConfigError: an argument is unknown, or has the wrong type or range.
    """
    name, arguments = config.adv_estimator, dict(config.adv_estimator_kwargs)
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    if reason := why_not_called(estimator, *[None] * 5, **arguments):
        raise ConfigError(f"actor.adv_estimator_kwargs has {', '.join(arguments)}, but of the estimator {name}: {reason}.")
    refuse_wrong_arguments(estimator, arguments, "actor.adv_estimator_kwargs")
    return partial(estimator, **arguments)


def gae_advantages(
    rewards_BL: Tensor,
    values_BL: Tensor,
    mask_BL: Tensor,
    bootstrap_B: Tensor,
    reduce: Reduce,
    /,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    lam_critic: Share | None = None,
    length_alpha: Positive | None = None,
    level: Literal["token", "turn"] = "token",
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of the policy and the targets of the critic. This is ``adv_estimator: gae``.

    The policy and the critic may use different λ (VAPO, arXiv 2504.05118, section 4.1): with ``lam_critic=1``, the critic is trained on
    returns that do not depend on its own values.

    Args:
        rewards_BL: reward of each trained token.
        values_BL: the critic's value of the state before each token.
        mask_BL: 1 for trained tokens.
        bootstrap_B: value of the state after each row; 0 for rows that ended by themselves.
        reduce: sums over ranks, for whitening.
        gamma: discount from a trained token to the next.
        lam: λ of the policy's advantages.
        lam_critic: λ of the critic's targets. If None, that of the policy before ``length_alpha``.
        length_alpha: α of VAPO's length-adaptive λ, which takes the place of ``lam`` for the policy (``length_adaptive_lambda``).
        level: ``turn`` takes each turn (a run of trained tokens) as one action (``turn_gae``).
        whiten: give advantages mean 0 and deviation 1 over the trained tokens of the batch.

    Returns:
        Advantages and returns, both ``[B, L]`` and 0 at tokens that are not trained.
    """
    estimate = turn_gae if level == "turn" else gae
    policy_lam = lam if length_alpha is None else length_adaptive_lambda(mask_BL, length_alpha)
    advantages_BL, returns_BL = estimate(rewards_BL, values_BL, mask_BL, bootstrap_B, gamma=gamma, lam=policy_lam)
    critic_lam = lam if lam_critic is None else lam_critic
    if length_alpha is not None or critic_lam != lam:
        _, returns_BL = estimate(rewards_BL, values_BL, mask_BL, bootstrap_B, gamma=gamma, lam=critic_lam)
    return whitened(advantages_BL, mask_BL, reduce) if whiten else advantages_BL, returns_BL


@torch.no_grad()
def gae(
    rewards_BL: Tensor,
    values_BL: Tensor,
    mask_BL: Tensor,
    bootstrap_B: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages over trained tokens.

    With t' the next trained token of the row, δ_t = r_t + γ V_t' − V_t and A_t = δ_t + γλ A_t' (arXiv 1506.02438, equations 11 and 16).
    After the last trained token, V_t' is ``bootstrap_B`` and A_t' is 0. The sums are computed in float64.

    Args:
        rewards_BL: reward of each trained token; entries at other tokens are ignored.
        values_BL: value of the state before each token; entries at other tokens are ignored.
        mask_BL: 1 for trained tokens.
        bootstrap_B: value of the state after the row: the critic's if a length limit cut the row, 0 if the row ended by itself. None
            stands for 0.
        gamma: discount from a trained token to the next.
        lam: λ, one number or one for each row ``[B]``.

    Returns:
        Advantages A and returns A + V, both ``[B, L]`` in the type of ``values_BL``, and 0 at tokens that are not trained.
    """
    rewards, values = rewards_BL.double().cpu(), values_BL.double().cpu()
    trained = mask_BL.cpu() > 0
    decay = gamma * torch.as_tensor(lam, dtype=torch.float64).cpu()
    advantages = torch.zeros_like(values)
    carried = values.new_zeros(len(values))
    following = carried.clone() if bootstrap_B is None else bootstrap_B.double().cpu()
    for t in reversed(trained.any(0).nonzero().flatten().tolist()):
        here = rewards[:, t] + gamma * following - values[:, t] + decay * carried
        carried = torch.where(trained[:, t], here, carried)
        following = torch.where(trained[:, t], values[:, t], following)
        advantages[:, t] = carried
    advantages = advantages * trained
    returns = (advantages + values).masked_fill(~trained, 0.0)
    return advantages.to(values_BL), returns.to(values_BL)


@torch.no_grad()
def turn_gae(
    rewards_BL: Tensor,
    values_BL: Tensor,
    mask_BL: Tensor,
    bootstrap_B: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages over turns: a turn, a run of trained tokens without a gap, is one action of ``gae``.

    Its reward is the sum of its tokens' rewards, and its value is that of the state before its first token. All its tokens have the
    turn's advantage and the turn's return.

    Args and returns are those of ``gae``; ``gamma`` is the discount from a turn to the next.
    """
    trained = mask_BL > 0
    if not bool(trained.any()):
        return torch.zeros_like(values_BL), torch.zeros_like(values_BL)
    first_BL = trained & ~torch.nn.functional.pad(trained, (1, 0))[:, :-1]
    turn_BL = (first_BL.cumsum(1) - 1).clamp(min=0)
    turns = int(turn_BL.max()) + 1

    def of_turns(values: Tensor, kept_BL: Tensor) -> Tensor:
        return values.new_zeros(len(values), turns).scatter_add(1, turn_BL, values * kept_BL)

    exists_BN = of_turns(first_BL.to(values_BL.dtype), first_BL)
    advantages_BN, returns_BN = gae(
        of_turns(rewards_BL, trained), of_turns(values_BL, first_BL), exists_BN, bootstrap_B, gamma=gamma, lam=lam
    )
    return advantages_BN.gather(1, turn_BL) * trained, returns_BN.gather(1, turn_BL) * trained


def length_adaptive_lambda(mask_BL: Tensor, alpha: float) -> Tensor:
    """Return VAPO's λ of each row, ``[B]``: 1 − 1/(α · length), at least 0; the length is the number of trained tokens.

    The sum of the weights of the temporal differences is then about α · length (arXiv 2504.05118, equation 10).
    """
    lengths_B = (mask_BL > 0).sum(1).clamp(min=1).double()
    return (1.0 - 1.0 / (alpha * lengths_B)).clamp(min=0.0)


def rewards_of_actions(rewards_B: Tensor, token_rewards_BL: Tensor | None, mask_BL: Tensor) -> Tensor:
    """Return the reward of each trained token, ``[B, L]``.

    The row's reward is on its last trained token. A token reward is on its token or, if that is not trained (such as a tool's answer), on
    the last trained token before it, which brought it about. A reward before the first trained token, which no action brought about, and
    all rewards of a row without trained tokens are left out.

    Args:
        rewards_B: reward of each row.
        token_rewards_BL: further rewards of tokens; None if there are none.
        mask_BL: 1 for trained tokens.
    """
    trained = mask_BL > 0
    columns_L = torch.arange(trained.shape[1], device=trained.device).expand_as(trained)
    latest_BL = torch.where(trained, columns_L, -1).cummax(1).values  # the trained token at or before each token
    result_BL = torch.zeros_like(mask_BL, dtype=rewards_B.dtype)
    if token_rewards_BL is not None:
        result_BL.scatter_add_(1, latest_BL.clamp(min=0), token_rewards_BL.to(rewards_B.dtype) * (latest_BL >= 0))
    if trained.shape[1]:
        last_B = latest_BL[:, -1]
        result_BL.scatter_add_(1, last_B.clamp(min=0)[:, None], (rewards_B * (last_B >= 0))[:, None])
    return result_BL


def whitened(values_BL: Tensor, mask_BL: Tensor, reduce: Reduce, *, eps: float = 1e-8) -> Tensor:
    """Give values mean 0 and variance 1 over the tokens whose mask is 1, on all ranks.

    The variance has Bessel's correction, and ``eps`` is added to it, as in PPO's common implementations for language models. Values that
    are all equal become 0.

    Args:
        values_BL: the values.
        mask_BL: 1 for tokens that count.
        reduce: sums over ranks.
        eps: added to the variance.

    Returns:
        ``[B, L]``, 0 where the mask is 0.
    """
    mask, values = (mask_BL > 0).double(), values_BL.double()
    count, total = reduce(torch.stack([mask.sum(), (values * mask).sum()])).unbind()
    mean = total / count.clamp(min=1)
    variance = reduce(((values - mean).square() * mask).sum()) / (count - 1).clamp(min=1)
    return ((values - mean) * torch.rsqrt(variance + eps) * mask).to(values_BL.dtype)


def value_loss(
    values_BL: Tensor, old_values_BL: Tensor, returns_BL: Tensor, eps_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the critic's loss for each token: ½ · max((V − R)², (clip(V, V_old ± ε) − R)²).

    This is the clipped value loss of PPO's first implementation (openai/baselines, ``ppo2``).

    Args:
        values_BL: current values V, with gradient.
        old_values_BL: values V_old before the first step on the batch.
        returns_BL: targets R.
        eps_clip: ε; None does not clip.

    Returns:
        The loss ``[B, L]``, and a bool mask of the tokens whose clipped term is the larger one.
    """
    plain_BL = (values_BL - returns_BL).square()
    if eps_clip is None:
        return 0.5 * plain_BL, torch.zeros_like(plain_BL, dtype=torch.bool)
    near_BL = old_values_BL + (values_BL - old_values_BL).clamp(-eps_clip, eps_clip)
    clipped_BL = (near_BL - returns_BL).square()
    return 0.5 * torch.maximum(plain_BL, clipped_BL), clipped_BL > plain_BL


def explained_variance(values_BL: Tensor, returns_BL: Tensor, mask_BL: Tensor, reduce: Reduce) -> float:
    """Return 1 − Var(R − V) / Var(R) over the tokens whose mask is 1, on all ranks; NaN if the returns have no variance.

    1 means that the values equal the returns up to a constant, 0 that they explain nothing; a worse critic is negative.
    """
    mask, returns = (mask_BL > 0).double(), returns_BL.double()
    residual = returns - values_BL.double()

    def variance(each: Tensor) -> Tensor:
        count, total = reduce(torch.stack([mask.sum(), (each * mask).sum()])).unbind()
        mean = total / count.clamp(min=1)
        return reduce(((each - mean).square() * mask).sum()) / count.clamp(min=1)

    whole = float(variance(returns))
    return 1.0 - float(variance(residual)) / whole if whole > 1e-12 else float("nan")
