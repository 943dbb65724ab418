"""Train a model with direct preference optimisation (DPO) against a frozen reference."""

from __future__ import annotations

import torch
from torch import Tensor

from rollwright.algorithms.losses import dpo_loss
from rollwright.errors import TrainingError
from rollwright.experience.trajectory import Trajectory, tensor_container_to
from rollwright.training import parallel
from rollwright.training.engine import TrainEngine, trained_tokens


class PreferenceEngine(TrainEngine):
    """A model that learns which of two replies to prefer.

    The loss of a pair depends on both of its rows, which may be in different micro-batches. Therefore all rows are scored first, and the
    loss is differentiated with respect to their log-probabilities. The backward pass then weights the tokens of each row by this
    derivative. By the chain rule, the gradient is the same, at the cost of one more forward pass.
    """

    needs_reference = True

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
        assert self.reference is not None
        batch = tensor_container_to(dict(batch), self.device)
        batch.pop("temperature", None)
        mask_BL = trained_tokens(batch)
        rows = mask_BL.shape[0]
        if rows % 2 or not bool(mask_BL.any(-1).all()):
            raise TrainingError(
                f"A batch of preferences has {rows} rows, and {int((~mask_BL.any(-1)).sum())} of them have no token to train: it "
                "takes two rows a pair, the preferred reply first, each with at least one token."
            )
        reference_BL = batch.pop("ref_logp", None)
        if reference_BL is None:
            reference_BL = self.reference.compute_logp(batch, loss_tokens_only=True)
        reference_B = (reference_BL * mask_BL).double().sum(-1)
        policy_B = self.compute_logp(batch, loss_tokens_only=True).double().sum(-1).requires_grad_()
        loss_P, margin_P = dpo_loss(
            policy_B[0::2], policy_B[1::2], reference_B[0::2], reference_B[1::2], beta=beta, label_smoothing=label_smoothing
        )
        pairs = float(parallel.summed(torch.tensor(float(rows // 2), device=self.device)))
        (by_logp_B,) = torch.autograd.grad(loss_P.sum() / pairs, policy_B)
        batch["loss_weights"] = mask_BL * by_logp_B.float()[:, None]

        def loss(part: Trajectory, logprobs_BL: Tensor, entropy_BL: Tensor) -> Tensor:
            return (part["loss_weights"] * logprobs_BL).sum()

        lr = self.learning_rate
        step = self.optimise(batch, loss)
        sums = {
            "loss": loss_P.detach(),
            "margin": margin_P,
            "accuracy": (margin_P > 0).double(),
            "chosen_logp": policy_B.detach()[0::2],
            "rejected_logp": policy_B.detach()[1::2],
        }
        means = {name: float(parallel.summed(value.sum())) / pairs for name, value in sums.items()}
        return {**step, **means, "pairs": pairs, "lr": lr}
