"""The losses that ``TrainEngine.forward_backward`` knows by name: ``sft``, ``distill``, ``dpo`` and ``policy``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rollwright.algorithms.losses import dpo_loss, find_policy_loss, sft_loss
from rollwright.config.teachers import DistillationConfig
from rollwright.errors import TrainingError
from rollwright.experience.trajectory import Trajectory, tensor_container_to
from rollwright.training import parallel
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.batch_losses import BatchLoss
from rollwright.training.distillation import Distillation
from rollwright.training.engine import TrainEngine, trained_tokens
from rollwright.training.parallel import TokenStatistics
from rollwright.training.policy_update import ROW, PolicyUpdate, recomputes_logprobs


def sft(engine: TrainEngine, batch: Trajectory) -> BatchLoss:
    """Prepare the negative log-likelihood of the tokens whose ``loss_mask`` is 1, at temperature 1.

    Its metric is ``tokens``, their number on all ranks.

    Raises:
        TrainingError: there is no such token.
    """
    batch = tensor_container_to(dict(batch), engine.device)
    batch.pop("temperature", None)
    tokens = float(parallel.summed(trained_tokens(batch).float().sum()))
    if tokens == 0:
        raise TrainingError("A supervised batch has no token with loss_mask 1: nothing in it would train.")
    if batch.get("loss_weights") is None:
        batch["loss_weights"] = engine.loss_weights(batch)
    return BatchLoss(batch, lambda part, logprobs_BL, entropy_BL: sft_loss(logprobs_BL), measure=lambda: {"tokens": tokens})


def distill(engine: TrainEngine, batch: Trajectory, *, settings: dict[str, Any]) -> BatchLoss:
    """Prepare the loss ``sft`` together with the loss of a teacher that scored the rows.

    Its metrics are ``tokens`` and those of ``Distillation.loss``.

    Args:
        engine: the student.
        batch: rows with the columns of ``rollout.teachers.Teachers``.
        settings: keys of ``DistillationConfig``; ``reward_weight`` weights the negative log-likelihood.

    Raises:
        TrainingError: the teacher's columns are missing, or no token trains.
    """
    distillation = Distillation(DistillationConfig(**settings))
    distillation.require_scores(batch, "forward_backward")
    prepared, statistics = sft(engine, batch), TokenStatistics(engine.device)

    def loss(part: Trajectory, logprobs_BL: Tensor, entropy_BL: Tensor) -> Tensor:
        mask_BL = (part["loss_weights"] != 0).to(logprobs_BL.dtype)
        taught_BL = distillation.loss(part, logprobs_BL, mask_BL, statistics)
        own_BL = distillation.config.reward_weight * sft_loss(logprobs_BL)
        return own_BL if taught_BL is None else own_BL + taught_BL

    return dataclasses.replace(prepared, loss=loss, measure=lambda: {**prepared.measure(), **statistics.export()})


def dpo(engine: TrainEngine, batch: Trajectory, *, beta: float = 0.1, label_smoothing: float = 0.0) -> BatchLoss:
    """Prepare the loss of direct preference optimisation (arXiv 2305.18290, eq. 7), as a mean over pairs.

    The loss of a pair depends on both of its rows, which may be in different micro-batches. Therefore all rows are scored first, and the
    loss is differentiated with respect to their log-probabilities. The backward pass then weights the tokens of each row by this
    derivative. By the chain rule, the gradient is the same, at the cost of one more forward pass.

    Args:
        engine: an engine with a reference, unless the batch has ``ref_logp``.
        batch, beta, label_smoothing: see ``PreferenceEngine.dpo_update``, which also lists the metrics.

    Raises:
        TrainingError: the rows are not pairs, a reply has no token, or there is no reference.
    """
    batch = tensor_container_to(dict(batch), engine.device)
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
        reference_BL = _reference_of(engine).compute_logp(batch, loss_tokens_only=True)
    reference_B = (reference_BL * mask_BL).double().sum(-1)
    policy_B = engine.compute_logp(batch, loss_tokens_only=True).double().sum(-1).requires_grad_()
    loss_P, margin_P = dpo_loss(
        policy_B[0::2], policy_B[1::2], reference_B[0::2], reference_B[1::2], beta=beta, label_smoothing=label_smoothing
    )
    pairs = float(parallel.summed(torch.tensor(float(rows // 2), device=engine.device)))
    (by_logp_B,) = torch.autograd.grad(loss_P.sum() / pairs, policy_B)
    batch["loss_weights"] = mask_BL * by_logp_B.float()[:, None]

    def measure() -> dict[str, float]:
        sums = {
            "loss": loss_P.detach(),
            "margin": margin_P,
            "accuracy": (margin_P > 0).double(),
            "chosen_logp": policy_B.detach()[0::2],
            "rejected_logp": policy_B.detach()[1::2],
        }
        means = {name: float(parallel.summed(value.sum())) / pairs for name, value in sums.items()}
        return {**means, "pairs": pairs}

    return BatchLoss(batch, lambda part, logprobs_BL, entropy_BL: logprobs_BL, measure=measure)


def _reference_of(engine: TrainEngine) -> Any:
    if engine.reference is None:
        raise TrainingError(
            "The loss 'dpo' needs a reference: train a PreferenceEngine, call load_reference() before initialize(), or put the "
            "reference's log-probabilities into the batch as ref_logp."
        )
    return engine.reference


def policy(engine: TrainEngine, batch: Trajectory, *, policy_loss: str | None = None, **arguments: Any) -> BatchLoss:
    """Prepare the policy loss of the ``actor`` section, with its KL and entropy terms, as ``ppo_update`` does for one minibatch.

    The metrics are those of ``ppo_update``. As there, ``trainer_logprobs`` and ``entropies`` are written into the batch.

    Args:
        engine: the policy.
        batch: a trajectory after ``compute_advantages``.
        policy_loss: name of another policy loss than the section's.
        arguments: its arguments, as in ``actor.policy_loss_kwargs``.

    Raises:
        TrainingError: the engine is not a policy, or the batch lacks ``prox_logp``, which can no longer be computed.
    """
    if not isinstance(engine, FSDPPPOActor):
        raise TrainingError(
            f"{type(engine).__name__} has no actor section, which a policy loss is made from: use FSDPPPOActor."
        )
    config, loss = engine.config, engine.policy_loss
    if policy_loss is not None or arguments:
        kwargs = arguments if policy_loss is not None else {**config.policy_loss_kwargs, **arguments}
        config = dataclasses.replace(config, policy_loss=policy_loss or config.policy_loss, policy_loss_kwargs=kwargs)
        loss = find_policy_loss(config)
    given, batch = batch, engine.for_update(batch)
    if recomputes_logprobs(config) and "prox_logp" not in batch and not engine.is_as_published:
        raise TrainingError(
            "forward_backward: the loss compares with the policy before the first optimizer step (actor.recompute_logprob or "
            "use_decoupled_loss), and a step was made since version "
            f"{engine.version} was published: before that step, set batch['prox_logp'] = actor.compute_logp(batch)."
        )
    update = PolicyUpdate(config, loss, engine.version, batch)
    update.before_first_step = engine.is_as_published
    given["trainer_logprobs"], given["entropies"] = update.logprobs_BL, update.entropies_BL
    if batch.get("loss_weights") is None:
        batch["loss_weights"] = engine.loss_weights(batch)
    if config.positive_nll_coef > 0:
        batch["positive_weights"] = engine.positive_weights(batch)
    batch[ROW] = torch.arange(batch["input_ids"].shape[0], device=engine.device)
    is_empty = float(parallel.summed(batch["update_mask"].sum())) == 0
    return BatchLoss(
        batch,
        update.loss,
        with_entropy=True,
        entropy_gradient=config.entropy_coef > 0,
        measure=lambda: {**update.measured(0 if is_empty else 1), **engine.probe_metrics()},
        is_empty=is_empty,
    )
