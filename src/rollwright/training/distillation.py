"""The teacher's part of an update: a term of the advantages, or a term of the loss, with its metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from rollwright.algorithms.teachers import find_teacher_loss, mass
from rollwright.config.teachers import DistillationConfig
from rollwright.errors import TrainingError
from rollwright.experience.contract import CANDIDATE_LOGPROBS, TEACHER_TOP
from rollwright.experience.trajectory import Trajectory
from rollwright.training.parallel import TokenStatistics

_SCORES = ("teacher_logprobs", "teacher_weights")


class Distillation:
    """Applies the teacher loss of a config section to batches that teachers have scored.

    Args:
        config: the section.
    """

    def __init__(self, config: DistillationConfig) -> None:
        self.config = config
        self._loss = find_teacher_loss(config.loss)

    @property
    def is_active(self) -> bool:
        """True if there is a teacher loss."""
        return self._loss.kind != "none"

    @property
    def uses_rewards(self) -> bool:
        """True if advantages come from rewards, too."""
        return not self.is_active or self.config.reward_weight > 0

    def require_scores(self, batch: Trajectory, where: str) -> None:
        """Raise an error if the teachers' columns are missing.

        Raises:
            TrainingError: a column is missing.
        """
        wanted = (*_SCORES, *TEACHER_TOP) if self._loss.kind == "top" else _SCORES
        if missing := [key for key in wanted if self.is_active and batch.get(key) is None]:
            raise TrainingError(
                f"{where}: distillation.loss is {self.config.loss!r}, but the batch has no {', '.join(missing)}: no teacher scored it. "
                "Name the teacher in the config (teachers), or add the columns."
            )

    def mixed_advantages(self, batch: Trajectory, advantages_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Weight the advantages from rewards and, if the loss is an advantage, add the teacher's; ``[B, L]``."""
        if not self.is_active:
            return advantages_BL
        self.require_scores(batch, "compute_advantages")
        mixed_BL = advantages_BL * self.config.reward_weight
        if self._loss.kind != "advantage":
            return mixed_BL
        behaviour_BL, teacher_BL, taught_BL = (batch[key].to(mask_BL.device, mask_BL.dtype) for key in ("logprobs", *_SCORES))
        own_BL = self._loss(behaviour_BL, teacher_BL, self.config)
        return mixed_BL + self.config.weight * taught_BL * own_BL * mask_BL

    def loss(self, part: Trajectory, logp_BL: Tensor, mask_BL: Tensor, statistics: TokenStatistics) -> Tensor | None:
        """Compute the teacher's loss of each token of a micro-batch, and add the micro-batch to the metrics.

        Args:
            part: the micro-batch.
            logp_BL: log-probabilities of the tokens under the policy, with gradient.
            mask_BL: 1 where a token trains.
            statistics: the metrics of the update.

        Returns:
            ``[B, L]``, weighted but not aggregated; None if the teacher is in the advantages, or if there is none.
        """
        if not self.is_active:
            return None
        teacher_BL, taught_BL = (part[key].to(logp_BL.dtype) for key in _SCORES)
        taught_BL = taught_BL * mask_BL
        is_taught_BL = (taught_BL > 0).to(logp_BL.dtype)
        statistics.mean("teacher/kl", (logp_BL - teacher_BL).detach(), is_taught_BL)
        statistics.mean("teacher/logprob", teacher_BL, is_taught_BL)
        statistics.mean("teacher/taught_share", is_taught_BL, mask_BL)
        if self._loss.kind == "advantage":
            return None
        if self._loss.kind == "top":
            ids_BLK, teacher_top_BLK = part[TEACHER_TOP[0]], part[TEACHER_TOP[1]].to(logp_BL.dtype)
            policy_top_BLK = part[CANDIDATE_LOGPROBS].to(logp_BL.dtype)
            values_BL = self._loss(policy_top_BLK, teacher_top_BLK, self.config)
            is_best_BL = (ids_BLK[..., 0] == part["input_ids"]).to(logp_BL.dtype)
            statistics.mean("teacher/agreement", is_best_BL, is_taught_BL)
            statistics.mean("teacher/top_mass", mass(teacher_top_BLK), is_taught_BL)
            statistics.mean("teacher/policy_mass", mass(policy_top_BLK.detach()), is_taught_BL)
        else:
            values_BL = self._loss(logp_BL, teacher_BL, self.config)
        values_BL = torch.where(is_taught_BL > 0, values_BL, torch.zeros_like(values_BL))
        statistics.mean("teacher/loss", values_BL.detach(), is_taught_BL)
        return self.config.weight * taught_BL * values_BL
