"""Visibility in rows with isolated branches; the rule that engine and trainer share.

A row's ``branch_ids`` are 0 on the trunk and 1, 2, … on its branches. All tokens see the trunk, the trunk sees all tokens, and a branch sees
only the trunk and itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sees(query_branches: Tensor, key_branches: Tensor) -> Tensor:
    """Mask ``[..., Q, K]`` of the keys that each query sees, from branches ``[..., Q]`` and ``[..., K]``; not causal."""
    query, key = query_branches[..., :, None], key_branches[..., None, :]
    return (key == 0) | (key == query) | (query == 0)


def branch_attention(branch_ids_BL: Tensor) -> Tensor:
    """Causal attention mask ``[B, L, L]`` without other branches."""
    length = branch_ids_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=branch_ids_BL.device).tril()
    return sees(branch_ids_BL, branch_ids_BL) & causal_LL


def last_visible(branch_ids_BL: Tensor) -> Tensor:
    """Column of the token that predicts each token: the last earlier one that it attends to.

    Without branches this is the column to the left. The first token of a branch is predicted by the trunk that it starts from. The first
    column, which nothing predicts, gets 0.
    """
    columns_L = torch.arange(branch_ids_BL.shape[1], device=branch_ids_BL.device)
    before_BLL = branch_attention(branch_ids_BL).tril(-1)
    return (before_BLL * columns_L).amax(-1)
