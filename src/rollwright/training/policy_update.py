"""The loss of a policy update over one batch, and its metrics. ``docs/training.md`` lists the metrics."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollwright.algorithms.advantages import groups_without_variance
from rollwright.algorithms.losses import (
    PolicyLoss,
    behaviour_weight,
    interpolated_prox_logp,
    k3,
    kl_estimate,
    kl_loss,
)
from rollwright.config.sections import PPOActorConfig
from rollwright.experience.contract import ROUTED_EXPERTS
from rollwright.experience.players import compared_rows, trainable_rows
from rollwright.experience.trajectory import Trajectory
from rollwright.training import parallel
from rollwright.training.distillation import Distillation
from rollwright.training.parallel import TokenStatistics

#: Number of bins of the staleness histogram: 0, 1, … versions; the last bin has no upper bound.
STALENESS_BINS = 10
#: Minibatch column that holds each row's index in the whole batch.
ROW = "_row"


def recomputes_logprobs(config: PPOActorConfig) -> bool:
    """Return True if policy ratios use the trainer's own log-probabilities, recomputed before the first step."""
    return config.recompute_logprob or (config.use_decoupled_loss and config.prox_logp_method == "recompute")


class PolicyUpdate:
    """The loss of a policy update over one batch, and its metrics.

    ``TrainEngine.optimise`` calls ``loss`` for each micro-batch. If ``prox_logp`` was not computed beforehand, ``logprobs_BL`` of a
    minibatch after the first comes from the policy just before that minibatch's step.

    Args:
        config: the ``actor`` section.
        policy_loss: the result of ``find_policy_loss(config)``.
        version: version of the weights before the update.
        batch: all rows of the update, on the trainer's device.

    Attributes:
        before_first_step: True while no optimizer step has been made on this batch, so that the current policy is the proximal policy.
        logprobs_BL: the trainer's log-probability of each trained token before the first step.
        entropies_BL: the policy's entropy at each trained token.
    """

    def __init__(
        self,
        config: PPOActorConfig,
        policy_loss: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], PolicyLoss],
        version: int,
        batch: Trajectory,
    ) -> None:
        self.config, self.policy_loss, self.version = config, policy_loss, version
        self.distillation = Distillation(config.distillation)
        self.before_first_step = True
        self.logprobs_BL = torch.zeros_like(batch["update_mask"], dtype=torch.float32)
        self.entropies_BL = torch.zeros_like(self.logprobs_BL)
        self._statistics = TokenStatistics(self.logprobs_BL.device)
        self._measure_batch(batch)

    def loss(self, part: Trajectory, logp_BL: Tensor, entropy_BL: Tensor) -> Tensor:
        """Compute the weighted sum of a micro-batch's token losses, and add the micro-batch to the metrics."""
        config, statistics = self.config, self._statistics
        weights_BL, mask_BL = part["loss_weights"], part["update_mask"] * (part["loss_weights"] != 0)
        behaviour_BL = part["logprobs"].to(logp_BL.dtype) * mask_BL
        prox_BL = self._proximal(part, logp_BL, behaviour_BL) * mask_BL
        if part.get("logprobs_shifted") is not None:  # not the policy's own: use the proximal ones
            behaviour_BL = torch.where(part["logprobs_shifted"][:, None], prox_BL, behaviour_BL)
        policy = self.policy_loss(logp_BL, prox_BL, part["advantages"].to(logp_BL.dtype), mask_BL, behaviour_BL)
        values_BL = policy.values
        if config.use_decoupled_loss:
            weight_BL, capped_BL = behaviour_weight(
                prox_BL,
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
        statistics.add("policy_loss", total, torch.zeros_like(total))  # ``metrics`` adds the number of steps
        if config.kl_ctl > 0:
            reference_BL = part["ref_logp"].to(logp_BL.dtype) * mask_BL
            if config.kl_in == "loss":
                total = total + config.kl_ctl * (weights_BL * kl_loss(logp_BL, reference_BL, config.kl_estimator)).sum()
            statistics.mean("kl", kl_estimate(logp_BL.detach(), reference_BL, config.kl_estimator), mask_BL)
        taught_BL = self.distillation.loss(part, logp_BL, mask_BL, statistics)
        if taught_BL is not None:
            total = total + (weights_BL * taught_BL).sum()
        if config.positive_nll_coef > 0:
            likelihood = (part["positive_weights"] * logp_BL).sum()
            total = total - config.positive_nll_coef * likelihood
            statistics.add("positive_nll", -likelihood, torch.zeros_like(total))
        if config.entropy_coef > 0:
            total = total - config.entropy_coef * (weights_BL * entropy_BL).sum()
        self._measure(part, logp_BL.detach(), behaviour_BL, policy, mask_BL)
        statistics.mean("entropy", entropy_BL, mask_BL)
        self._keep_scores(part, logp_BL.detach(), entropy_BL.detach(), mask_BL)
        return total

    def metrics(self, steps: list[dict[str, float]], learning_rate: float) -> dict[str, float]:
        """Compute the metrics of the whole update.

        Args:
            steps: results of ``TrainEngine.optimise``, one for each optimizer step.
            learning_rate: learning rate of these steps.
        """
        made = [step for step in steps if not step["skipped_steps"]]
        means = {name: sum(step[name] for step in made) / len(made) for name in ("loss", "grad_norm")} if made else {}
        counts = {"optimizer_steps": float(len(made)), "skipped_steps": float(len(steps) - len(made))}
        return {**counts, **means, "lr": learning_rate, **self.measured(len(steps))}

    def measured(self, minibatches: int) -> dict[str, float]:
        """Return the metrics of the tokens of so many minibatches. Collective."""
        count = torch.tensor(minibatches / parallel.world_size())
        for name in ("policy_loss", *(["positive_nll"] if self.config.positive_nll_coef > 0 else [])):
            self._statistics.add(name, torch.zeros((), device=self.logprobs_BL.device), count)
        found = self._statistics.export()
        mean, mean_of_squares = found.pop("_weight", None), found.pop("_weight_squared", None)
        if mean is not None and mean_of_squares:  # Kish: (Σw)² / (n Σw²)
            found["effective_sample_size"] = mean**2 / mean_of_squares
        return found

    def _proximal(self, part: Trajectory, logp_BL: Tensor, behaviour_BL: Tensor) -> Tensor:
        """Return the log-probabilities of the proximal policy, the denominator of the ratio.

        If the config needs the trainer's own, they are ``prox_logp`` or, before the first step, the current log-probabilities, which are
        equal and need no extra forward pass. After the first step, they may be interpolated. In all other cases they are those at sampling.
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
    def _measure(self, part: Trajectory, logp_BL: Tensor, behaviour_BL: Tensor, policy: PolicyLoss, mask_BL: Tensor) -> None:
        """Add a micro-batch to the statistics."""
        statistics, ratio_BL = self._statistics, policy.ratio
        statistics.mean("ratio/mean", ratio_BL, mask_BL)
        statistics.largest("ratio/max", ratio_BL, mask_BL)
        statistics.smallest("ratio/min", ratio_BL, mask_BL)
        statistics.mean("clip_share", policy.clipped.to(ratio_BL.dtype), mask_BL)
        to_current_BL = (logp_BL - behaviour_BL).clamp(-20, 20).exp()
        statistics.mean("_weight", to_current_BL, mask_BL)
        statistics.mean("_weight_squared", to_current_BL.square(), mask_BL)
        if self.before_first_step:  # compare the engine's log-probabilities of current-version tokens with the trainer's
            fresh_BL = mask_BL
            if part.get("versions") is not None:
                fresh_BL = mask_BL * (part["versions"] == self.version)
            if part.get("logprobs_shifted") is not None:
                fresh_BL = fresh_BL * ~part["logprobs_shifted"][:, None]
            difference_BL = (logp_BL - behaviour_BL).abs()
            if part.get("other_context") is not None:  # such tokens differ by construction, not because an engine is wrong
                moved_BL = fresh_BL * part["other_context"]
                fresh_BL = fresh_BL - moved_BL
                statistics.mean("context_mismatch/mean", difference_BL, moved_BL)
                statistics.largest("context_mismatch/max", difference_BL, moved_BL)
            statistics.mean("mismatch/kl", k3(behaviour_BL, logp_BL), fresh_BL)
            statistics.mean("logprob_difference/mean", difference_BL, fresh_BL)
            statistics.largest("logprob_difference/max", difference_BL, fresh_BL)

    @torch.no_grad()
    def _keep_scores(self, part: Trajectory, logp_BL: Tensor, entropy_BL: Tensor, mask_BL: Tensor) -> None:
        """Write a micro-batch's scores to the columns of the whole batch. Each row is in exactly one micro-batch."""
        if not len(self.logprobs_BL):
            return  # a rank without rows
        width, logp_BL = mask_BL.shape[1], part.get("prox_logp", logp_BL)
        self.logprobs_BL[:, :width].index_add_(0, part[ROW], (logp_BL * mask_BL).float())
        self.entropies_BL[:, :width].index_add_(0, part[ROW], (entropy_BL * mask_BL).float())

    @torch.no_grad()
    def _measure_batch(self, batch: Trajectory) -> None:
        """Measure what does not depend on the model: masks, truncation, staleness, variance within groups."""
        statistics, mask_BL = self._statistics, batch["update_mask"]
        sampled_BL = (batch["loss_mask"] > 0).to(mask_BL.dtype)
        attention = batch.get("attention_mask")
        attended_BL = torch.ones_like(mask_BL) if attention is None else attention.to(mask_BL.dtype)
        rows = torch.tensor(float(mask_BL.shape[0]), device=mask_BL.device)
        statistics.add("tokens_per_row/trained", mask_BL.sum(), rows)
        statistics.add("tokens_per_row/all", attended_BL.sum(), rows)
        statistics.add("masked_share", (sampled_BL - mask_BL).clamp(min=0).sum(), sampled_BL.sum())
        if batch.get("rewards") is not None and batch.get("group_ids") is not None:
            trained, compared_B = trainable_rows(batch), compared_rows(batch)
            without, groups = groups_without_variance(batch.get("returns", batch["rewards"])[trained], compared_B[trained])
            statistics.add("groups_without_variance", without, groups)
        if batch.get(ROUTED_EXPERTS) is not None:
            has_experts_BL = (batch[ROUTED_EXPERTS] > 0).any(-1).to(mask_BL.dtype)
            statistics.mean("replayed_experts_share", has_experts_BL[:, :-1], attended_BL[:, 1:])  # each row but its last token
        if batch.get("reward_clipped") is not None:
            statistics.add("reward_clipped_share", batch["reward_clipped"].double().sum(), rows)
        statistics.mean("advantage/abs_mean", batch["advantages"].abs(), mask_BL)
        if batch.get("versions") is not None:
            staleness_BL = (self.version - batch["versions"]).clamp(min=0)
            statistics.mean("staleness/mean", staleness_BL.double(), mask_BL)
            statistics.largest("staleness/max", staleness_BL.double(), mask_BL)
            for age in range(STALENESS_BINS):
                last = age == STALENESS_BINS - 1
                of_age_BL = (staleness_BL >= age) if last else (staleness_BL == age)
                statistics.mean(f"staleness/share_{age}{'_or_more' if last else ''}", of_age_BL.to(mask_BL.dtype), mask_BL)
