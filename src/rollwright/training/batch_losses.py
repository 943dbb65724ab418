"""Losses of a batch, as ``TrainEngine.forward_backward`` takes them: a function of a micro-batch, or a name.

A loss is divided over micro-batches, so it is a sum over tokens whose weights already include the denominator of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from rollwright.config.recipes import POLICY_LOSSES, RECIPES
from rollwright.errors import TrainingError
from rollwright.experience.trajectory import Trajectory
from rollwright.registry import Registry, suggestion, why_not_called

#: Maps a micro-batch's rows, log-probabilities and entropies to its token losses ``[B, L]``, or to their weighted sum.
MicroBatchLoss = Callable[[Trajectory, Tensor, Tensor], Tensor]


@dataclass
class BatchLoss:
    """A loss over one batch.

    Attributes:
        batch: a trajectory on the trainer's device, with ``loss_weights [B, L]``, the weight of each token; 0 for tokens that are not
            trained.
        loss: called for each micro-batch.
        with_entropy: compute entropies and pass them to ``loss``.
        entropy_gradient: let gradients flow through the entropies.
        measure: called after the backward pass; returns the metrics of the batch.
        is_empty: True if no token on any rank trains, so that nothing is computed.
    """

    batch: Trajectory
    loss: MicroBatchLoss
    with_entropy: bool = False
    entropy_gradient: bool = False
    measure: Callable[[], dict[str, float]] = dict
    is_empty: bool = False


#: Losses by name: called with the engine, the batch and the arguments of the loss.
BATCH_LOSSES: Registry[Callable[..., BatchLoss]] = Registry(
    "loss of a batch",
    TrainingError,
    variable="BATCH_LOSSES",
    built_in={name: f"rollwright.training.named_losses:{name}" for name in ("sft", "distill", "dpo", "policy")},
)


def named_loss(name: str, engine: Any, batch: Trajectory, arguments: dict[str, Any]) -> BatchLoss:
    """Prepare the loss with a name: one of ``BATCH_LOSSES``, or a policy loss, which replaces that of the ``actor`` section.

    Raises:
        TrainingError: there is no such loss, or it takes other arguments.
    """
    if name in BATCH_LOSSES:
        make = BATCH_LOSSES.get(name)
        if why := why_not_called(make, engine, batch, **arguments):
            raise TrainingError(
                f"forward_backward: the loss {name!r} was given {', '.join(arguments) or 'no arguments'}, but {why}."
            )
    elif name in POLICY_LOSSES:
        make = partial(BATCH_LOSSES.get("policy"), policy_loss=name)
    elif name in RECIPES:
        raise TrainingError(
            f"forward_backward: {name!r} is a recipe, which also sets how advantages are computed: set actor.recipe, and give the "
            "loss 'policy'."
        )
    else:
        known = [*BATCH_LOSSES, *POLICY_LOSSES]
        raise TrainingError(
            f"forward_backward: there is no loss {name!r}.{suggestion(name, known, as_sentence=True)} There are: {', '.join(known)}; "
            "or give a function of (rows, logprobs, entropies)."
        )
    return make(engine, batch, **arguments)


def weighted_sum(value: Any, part: Trajectory) -> Tensor:
    """Return the weighted sum of a micro-batch's token losses.

    Args:
        value: the result of a ``MicroBatchLoss``.
        part: the micro-batch.

    Raises:
        TrainingError: it is neither a number nor a loss for each token.
    """
    weights_BL = part["loss_weights"]
    if isinstance(value, Tensor) and value.ndim == 0:
        return value
    if not isinstance(value, Tensor) or value.shape != weights_BL.shape:
        found = f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TrainingError(
            f"forward_backward: the loss returned {found}; return the loss of each token, {list(weights_BL.shape)}, or the sum "
            "over tokens of loss times rows['loss_weights']."
        )
    return (weights_BL * value).sum()
