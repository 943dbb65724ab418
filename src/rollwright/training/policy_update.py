"""The loss of a policy update, micro-batch by micro-batch, and what is measured beside it: of each batch, loss and token.

``FSDPPPOActor.ppo_update`` calls it; ``docs/training.md`` lists the metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollwright.algorithms.advantages import groups_without_variance
from rollwright.algorithms.kl import k3, kl_estimate, kl_loss
from rollwright.algorithms.losses import PolicyLoss
from rollwright.algorithms.ratios import behaviour_weight, interpolated_prox_logp
from rollwright.config.sections import PPOActorConfig
from rollwright.experience.trajectory import Trajectory
from rollwright.training.parallel import TokenStatistics

#: Bins of the staleness histogram: 0, 1, … versions, the last open.
STALENESS_BINS = 10
#: A key of minibatches: which row of the batch each is, for ``TokenScores``.
ROW = "_row"


def recomputes_logprobs(config: PPOActorConfig) -> bool:
    """True if the policy ratios use the trainer's own log-probabilities, recomputed before the first step."""
    return config.recompute_logprob or (config.use_decoupled_loss and config.prox_logp_method == "recompute")


@dataclass(frozen=True)
class PolicyUpdate:
    """The loss of a minibatch, as ``TrainEngine.optimise`` calls it for each micro-batch.

    Attributes:
        config: the ``actor`` section.
        policy_loss: the loss that it names.
        version: of the weights before the update.
        before_first_step: no optimizer step has been made on this batch, so that current log-probabilities are those of the
            proximal policy.
    """

    config: PPOActorConfig
    policy_loss: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], PolicyLoss]
    version: int
    before_first_step: bool
    scores: TokenScores | None = None  # where what is computed of each token goes

    def loss(self, part: Trajectory, logp_BL: Tensor, entropy_BL: Tensor, statistics: TokenStatistics) -> Tensor:
        """The weighted sum of a micro-batch's token losses."""
        config = self.config
        weights_BL, mask_BL = part["loss_weights"], part["update_mask"] * (part["loss_weights"] != 0)
        behaviour_BL = part["logprobs"].to(logp_BL.dtype) * mask_BL
        anchor_BL = self._anchor(part, logp_BL, behaviour_BL) * mask_BL
        if part.get("logprobs_shifted") is not None:  # not the policy's: its own before the first step take their place
            behaviour_BL = torch.where(part["logprobs_shifted"][:, None], anchor_BL, behaviour_BL)
        policy = self.policy_loss(logp_BL, anchor_BL, part["advantages"].to(logp_BL.dtype), mask_BL, behaviour_BL)
        values_BL = policy.values
        if config.use_decoupled_loss:
            weight_BL, capped_BL = behaviour_weight(
                anchor_BL,
                behaviour_BL,
                mask_BL,
                cap=config.behav_imp_weight_cap,
                mode=config.behav_imp_weight_mode,
                level=config.behav_imp_weight_level,
            )
            values_BL = values_BL * weight_BL
            statistics.mean("behaviour_weight/mean", weight_BL, mask_BL)
            statistics.mean("behaviour_weight/capped_share", capped_BL.to(logp_BL.dtype), mask_BL)
        total = (weights_BL * values_BL).sum()
        statistics.add("policy_loss", total, torch.zeros_like(total))  # the update adds the number of steps
        if config.kl_ctl > 0:
            reference_BL = part["ref_logp"].to(logp_BL.dtype) * mask_BL
            total = total + config.kl_ctl * (weights_BL * kl_loss(logp_BL, reference_BL, config.kl_estimator)).sum()
            statistics.mean("kl", kl_estimate(logp_BL.detach(), reference_BL, config.kl_estimator), mask_BL)
        if config.entropy_coef > 0:
            total = total - config.entropy_coef * (weights_BL * entropy_BL).sum()
        self._measure(part, logp_BL.detach(), behaviour_BL, policy, mask_BL, statistics)
        statistics.mean("entropy", entropy_BL, mask_BL)
        if self.scores is not None:
            self.scores.take(part, logp_BL.detach(), entropy_BL.detach(), mask_BL)
        return total

    def _anchor(self, part: Trajectory, logp_BL: Tensor, behaviour_BL: Tensor) -> Tensor:
        """Log-probabilities of the policy that the ratio is taken against.

        The trainer's own before the first step where they are wanted, else those at sampling. Before the first step the
        current ones are the same numbers, so that no forward pass is spent on them.
        """
        config = self.config
        if "prox_logp" in part:
            return part["prox_logp"].to(logp_BL.dtype)
        if (config.use_decoupled_loss or config.recompute_logprob) and self.before_first_step:
            return logp_BL.detach()
        if config.use_decoupled_loss and config.prox_logp_method == "interpolate":
            return interpolated_prox_logp(logp_BL, behaviour_BL, part["versions"], self.version)
        return behaviour_BL

    @torch.no_grad()
    def _measure(
        self,
        part: Trajectory,
        logp_BL: Tensor,
        behaviour_BL: Tensor,
        policy: PolicyLoss,
        mask_BL: Tensor,
        statistics: TokenStatistics,
    ) -> None:
        ratio_BL = policy.ratio
        statistics.mean("ratio/mean", ratio_BL, mask_BL)
        statistics.largest("ratio/max", ratio_BL, mask_BL)
        statistics.smallest("ratio/min", ratio_BL, mask_BL)
        statistics.mean("clip_share", policy.clipped.to(ratio_BL.dtype), mask_BL)
        # Kish: (Σw)² / (n Σw²), from two means.
        to_current_BL = (logp_BL - behaviour_BL).clamp(-20, 20).exp()
        statistics.mean("_weight", to_current_BL, mask_BL)
        statistics.mean("_weight_squared", to_current_BL.square(), mask_BL)
        if self.before_first_step:
            fresh_BL = mask_BL
            if part.get("versions") is not None:
                fresh_BL = mask_BL * (part["versions"] == self.version)
            if part.get("logprobs_shifted") is not None:
                fresh_BL = fresh_BL * ~part["logprobs_shifted"][:, None]
            difference_BL = (logp_BL - behaviour_BL).abs()
            if part.get("other_context") is not None:  # these differ by construction, not because an engine is wrong
                elsewhere_BL = fresh_BL * part["other_context"]
                fresh_BL = fresh_BL - elsewhere_BL
                statistics.mean("context_mismatch/mean", difference_BL, elsewhere_BL)
                statistics.largest("context_mismatch/max", difference_BL, elsewhere_BL)
            statistics.mean("mismatch/kl", k3(behaviour_BL, logp_BL), fresh_BL)
            statistics.mean("logprob_difference/mean", difference_BL, fresh_BL)
            statistics.largest("logprob_difference/max", difference_BL, fresh_BL)


class TokenScores:
    """What an update computed of each trained token: its log-probability under the trainer's weights before the first step (in a later
    minibatch, where none was computed before: of that minibatch), and the policy's entropy there.

    Args:
        batch: on the device of the trainer.
        into: the two columns are written into it.
    """

    def __init__(self, batch: Trajectory, into: Trajectory) -> None:
        self._logprobs_BL = torch.zeros_like(batch["update_mask"], dtype=torch.float32)
        self._entropies_BL = torch.zeros_like(self._logprobs_BL)
        into["trainer_logprobs"], into["entropies"] = self._logprobs_BL, self._entropies_BL

    @torch.no_grad()
    def take(self, part: Trajectory, logp_BL: Tensor, entropy_BL: Tensor, mask_BL: Tensor) -> None:
        """Add the scores of a micro-batch; each row is in one of them."""
        if not len(self._logprobs_BL):
            return  # a rank without rows
        width, logp_BL = mask_BL.shape[1], part.get("prox_logp", logp_BL)
        self._logprobs_BL[:, :width].index_add_(0, part[ROW], (logp_BL * mask_BL).float())
        self._entropies_BL[:, :width].index_add_(0, part[ROW], (entropy_BL * mask_BL).float())


@torch.no_grad()
def batch_diagnostics(batch: Trajectory, version: int, statistics: TokenStatistics) -> None:
    """Measure what does not depend on the model: masks, truncation, staleness, variance within groups."""
    mask_BL = batch["update_mask"]
    sampled_BL = (batch["loss_mask"] > 0).to(mask_BL.dtype)
    attention = batch.get("attention_mask")
    attended_BL = torch.ones_like(mask_BL) if attention is None else attention.to(mask_BL.dtype)
    rows = torch.tensor(float(mask_BL.shape[0]), device=mask_BL.device)
    statistics.add("tokens_per_row/trained", mask_BL.sum(), rows)
    statistics.add("tokens_per_row/all", attended_BL.sum(), rows)
    statistics.add("masked_share", (sampled_BL - mask_BL).clamp(min=0).sum(), sampled_BL.sum())
    if batch.get("rewards") is not None and batch.get("group_ids") is not None:
        without, groups = groups_without_variance(batch.get("returns", batch["rewards"]), batch["group_ids"])
        statistics.add("groups_without_variance", without, groups)
    if batch.get("reward_clipped") is not None:
        statistics.add("reward_clipped_share", batch["reward_clipped"].double().sum(), rows)
    statistics.mean("advantage/abs_mean", batch["advantages"].abs(), mask_BL)
    if batch.get("versions") is not None:
        staleness_BL = (version - batch["versions"]).clamp(min=0)
        statistics.mean("staleness/mean", staleness_BL.double(), mask_BL)
        statistics.largest("staleness/max", staleness_BL.double(), mask_BL)
        for age in range(STALENESS_BINS):
            last = age == STALENESS_BINS - 1
            here_BL = (staleness_BL >= age) if last else (staleness_BL == age)
            name = f"staleness/share_{age}{'_or_more' if last else ''}"
            statistics.mean(name, here_BL.to(mask_BL.dtype), mask_BL)


def with_effective_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """Replace the two means of the importance weight by Kish's effective sample size, ``(Σw)² / (n Σw²)``."""
    mean, mean_of_squares = metrics.pop("_weight", None), metrics.pop("_weight_squared", None)
    if mean is not None and mean_of_squares:
        metrics["effective_sample_size"] = mean**2 / mean_of_squares
    return metrics
