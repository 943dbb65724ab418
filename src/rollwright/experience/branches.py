"""Isolated branches: which token of a row sees which.

A row's ``branch_ids`` are 0 on the trunk and 1, 2, … on its branches. The trunk is seen by all and sees all; a branch sees the trunk and
itself. Engine and trainer take the rule from here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sees(query_branches: Tensor, key_branches: Tensor) -> Tensor:
    """``[..., Q, K]`` bool from branches ``[..., Q]`` and ``[..., K]``. Causality is apart."""
    query, key = query_branches[..., :, None], key_branches[..., None, :]
    return (key == 0) | (key == query) | (query == 0)


def branch_attention(branch_ids_BL: Tensor) -> Tensor:
    """Which token may attend to which, ``[B, L, L]`` bool: causal, and blind to other branches."""
    length = branch_ids_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=branch_ids_BL.device).tril()
    return sees(branch_ids_BL, branch_ids_BL) & causal_LL


def last_visible(branch_ids_BL: Tensor) -> Tensor:
    """For each token the column of the last token before it that it attends to, which is the one that predicts it.

    Without branches this is the column to the left; the first token of a branch is predicted by the trunk it grows from.
    The first column, which nothing predicts, gets 0.
    """
    columns_L = torch.arange(branch_ids_BL.shape[1], device=branch_ids_BL.device)
    before_BLL = branch_attention(branch_ids_BL).tril(-1)
    return (before_BLL * columns_L).amax(-1)
