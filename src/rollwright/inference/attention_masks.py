"""Restrict which tokens each token sees, on top of the masks of a Hugging Face model's layers.

A model builds one mask for each kind of layer (full, sliding, chunked) with transformers' mask functions. Passing a 4-D mask would
replace all of them, and layers would lose their windows. ``only_visible`` lets the model build its masks and combines each with the
restriction, so every layer keeps its window or chunk.

**Windows are measured in positions.** A layer with window ``W`` sees the keys whose position is greater than the query's minus ``W``; a
chunk spans the positions from one multiple of its size to the next. In an ordinary row, position and column are equal. In a row with
branches they differ: a branch continues the positions of the trunk, so its window is the same as in a row of the trunk and this
branch alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollwright.errors import ConfigError


@dataclass
class VisibleTokens:
    """Which keys a query may see, before layers apply their windows.

    Attributes:
        visible: ``[B, Q, K]`` bool, including causality. Each query sees at least one key.
        query_positions: ``[B, Q]``, positions of the queries.
        key_positions: ``[B, K]``, positions of the keys, including cached ones.
        masks: number of layer masks that were combined with this restriction. 0 after a forward pass means that the model builds its
            masks in another way and ignored the restriction.
    """

    visible: Tensor
    query_positions: Tensor
    key_positions: Tensor
    masks: int = 0

    def require_use(self, model: Any) -> None:
        """Check that the model's forward pass applied the restriction.

        Raises:
            ConfigError: no layer applied it.
        """
        if not self.masks:
            raise ConfigError(
                f"{type(model).__name__} does not build its attention masks with transformers' mask functions, so rows with "
                "branches (branch_ids) cannot be masked."
            )


@contextmanager
def only_visible(choice: VisibleTokens) -> Iterator[VisibleTokens]:
    """Inside the context, combine ``choice`` with every mask that models build in this thread.

    Pass the model a 2-D ``attention_mask`` or none; a 4-D mask would be used unchanged.

    Raises:
        ConfigError: in the model's forward pass, if a layer's mask cannot be combined with ``choice``.
    """
    _wrap_mask_functions()
    token = _choice.set(choice)
    try:
        yield choice
    finally:
        _choice.reset(token)


_choice: ContextVar[VisibleTokens | None] = ContextVar("visible_tokens", default=None)


@functools.cache
def _wrap_mask_functions() -> None:
    from transformers import AttentionMaskInterface

    masks = AttentionMaskInterface()
    for name in list(masks.valid_keys()):
        AttentionMaskInterface.register(name, _combined(name, masks[name]))


def _combined(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' mask function of an attention implementation so that it applies the current choice, if any."""
    from transformers.masking_utils import eager_mask, flex_attention_mask, sdpa_mask

    @functools.wraps(make)
    def mask(*args: Any, **arguments: Any) -> Any:
        choice = _choice.get()
        if choice is None or getattr(arguments["mask_function"], "__name__", "") == "bidirectional_mask_function":  # vision
            return make(*args, **arguments)
        if make not in (sdpa_mask, eager_mask, flex_attention_mask):
            raise ConfigError(
                f"attn_implementation={name} cannot mask tokens within a row, which branches (branch_ids) need: use sdpa."
            )
        allowed_BQK = choice.visible & _by_position(arguments["mask_function"], choice)
        if allowed_BQK.shape[1:] != (arguments["q_length"], arguments["kv_length"]):
            raise ConfigError(
                f"A layer's mask has {arguments['q_length']} queries and {arguments['kv_length']} keys, but visibility "
                f"was given for {tuple(allowed_BQK.shape[1:])}: the model cannot compute rows with branches."
            )
        choice.masks += 1
        changes = {
            "mask_function": lambda batch, _head, query, key: allowed_BQK[batch, query, key],
            "attention_mask": None,
            "local_size": None,
            "q_offset": 0,
            "kv_offset": 0,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
            "use_vmap": False,
        }
        return make(*args, **{**arguments, **changes})

    return mask


def _by_position(mask_function: Any, choice: VisibleTokens) -> Tensor:
    """Return the visible keys inside a layer's windows and chunks, which are measured in positions: ``[B, Q, K]`` bool."""
    seen = choice.visible
    query, key = choice.query_positions[:, None, :, None], choice.key_positions[:, None, None, :]
    rows = query.new_zeros(1, 1, 1, 1) + query.new_tensor(range(len(query)))[:, None, None, None]
    for overlay in _overlays(mask_function):
        seen = seen & overlay(rows, 0, query, key)[:, 0]
    return seen


def _overlays(mask_function: Any) -> list[Callable[..., Tensor]]:
    """Return the windows and chunks that a causal mask function of transformers applies."""
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    if name == "causal_mask_function":
        return []
    if name in ("sliding_window_overlay.<locals>.inner_mask", "chunked_overlay.<locals>.inner_mask"):
        return [mask_function]
    if name == "and_masks.<locals>.and_mask":
        (parts,) = (cell.cell_contents for cell in mask_function.__closure__)
        return [overlay for part in parts for overlay in _overlays(part)]
    raise ConfigError(f"A layer's mask is made by {name.split('.')[0]}, which cannot be combined with branches (branch_ids).")


# -- rows with branches --------------------------------------------------------------------------------------------------
#
# A row's ``branch_ids`` are 0 on the trunk and 1, 2, … on its branches. All tokens see the trunk, the trunk sees all tokens, and a branch
# sees only the trunk and itself. Engine and trainer share this rule.


def sees(query_branches: Tensor, key_branches: Tensor) -> Tensor:
    """Return the mask ``[..., Q, K]`` of the keys that each query sees, given branches ``[..., Q]`` and ``[..., K]``; not causal."""
    query, key = query_branches[..., :, None], key_branches[..., None, :]
    return (key == 0) | (key == query) | (query == 0)


def branch_attention(branch_ids_BL: Tensor) -> Tensor:
    """Return the causal attention mask ``[B, L, L]`` in which no branch sees another."""
    length = branch_ids_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=branch_ids_BL.device).tril()
    return sees(branch_ids_BL, branch_ids_BL) & causal_LL


def last_visible(branch_ids_BL: Tensor) -> Tensor:
    """Return, for each token, the column of the token that predicts it: the last earlier token that it attends to.

    Without branches this is the column to the left. The first token of a branch is predicted by the trunk that it starts from. The first
    column, which nothing predicts, gets 0.
    """
    columns_L = torch.arange(branch_ids_BL.shape[1], device=branch_ids_BL.device)
    before_BLL = branch_attention(branch_ids_BL).tril(-1)
    return (before_BLL * columns_L).amax(-1)
