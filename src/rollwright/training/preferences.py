"""Train a model with direct preference optimisation (DPO) against a frozen reference."""

from __future__ import annotations

from rollwright.experience.trajectory import Trajectory
from rollwright.training.engine import TrainEngine


class PreferenceEngine(TrainEngine):
    """A model that learns which of two replies to prefer. ``named_losses.dpo`` computes its loss."""

    needs_reference = True
    drops_out = False

    def dpo_update(self, batch: Trajectory, *, beta: float = 0.1, label_smoothing: float = 0.0) -> dict[str, float]:
        """Take one optimizer step of DPO (arXiv 2305.18290, eq. 7).

        Args:
            batch: ``input_ids``, ``attention_mask`` and ``loss_mask`` (the replies), all ``[2P, L]``: row 2i is the preferred reply
                of pair i, row 2i + 1 the rejected one. ``ref_logp [2P, L]`` is computed if absent.
            beta: strength of the pull towards the reference.
            label_smoothing: assumed share of pairs with swapped labels.

        Returns:
            ``loss`` (mean over pairs), ``accuracy`` (share of pairs with a positive margin), ``margin``, ``chosen_logp`` and
            ``rejected_logp`` (nats per reply), ``grad_norm``, ``skipped_steps``, ``pairs`` and ``lr``.

        Raises:
            TrainingError: the rows are not pairs, or a reply has no token.
        """
        metrics = self.forward_backward(batch, "dpo", beta=beta, label_smoothing=label_smoothing)
        return {**metrics, **self.optim_step()}
