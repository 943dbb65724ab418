"""From per-token losses to one number: each token's weight, with the denominator of the whole batch.

The loss is ``(weights_BL * token_losses_BL).sum()``. The weights are computed once, before the batch is divided into
micro-batches or over ranks, so that dividing it cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollwright.errors import ConfigError

Reduce = Callable[[Tensor], Tensor]


def _local(total: Tensor) -> Tensor:
    return total


def aggregation_weights(mask_BL: Tensor, how: str, *, constant: float = 1.0, reduce: Reduce = _local) -> Tensor:
    """The weight of every token in the loss.

    Args:
        mask_BL: 1 where a token trains.
        how: ``token``: the mean over all tokens of the batch (DAPO, arXiv 2503.14476, eq. 8). ``row``: the mean over rows
            of each row's mean (GRPO, arXiv 2402.03300, eq. 3); rows without a trained token are not counted.
            ``constant``: the sum over tokens divided by ``constant`` times the number of rows (Dr. GRPO, arXiv
            2503.20783), so that a long answer is not worth less for each token.
        constant: tokens that a row counts for where ``how`` is ``constant``.
        reduce: sums a scalar over the ranks that share the batch.

    Returns:
        ``[B, L]`` float, 0 where ``mask_BL`` is 0. All zeros where nothing trains.
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
