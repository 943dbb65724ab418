"""An explicit choice of the tokens that each token sees, on top of what a Hugging Face model's layers see by themselves.

A model makes one mask for each kind of its layers (full, sliding, chunked) with transformers' mask functions. A ready mask of four axes
would replace all of them by one, and a layer's window would be lost. ``only_visible`` lets the model make its masks and combines each of
them with the choice, so that every layer keeps its own window or chunk.

**Windows go by position.** A layer that looks back over ``W`` tokens sees those whose position is greater than the query's less ``W``; a
chunk holds the positions from a multiple of its size to the next. In an ordinary row position and column are the same. In a row with
branches they differ: a branch continues the positions of the trunk, so its window is the one that it has in a row of the trunk and
this branch alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rollwright.errors import ConfigError


@dataclass
class VisibleTokens:
    """Which keys a query may see, before the windows of layers.

    Attributes:
        visible: ``[B, Q, K]`` bool. Each query sees at least one key; causality is part of it.
        query_positions: ``[B, Q]``, positions of the queries.
        key_positions: ``[B, K]``, positions of the keys, those of a cache included.
        masks: how many masks the model made of it. 0 after a forward pass: the model makes its masks in another way and has ignored
            the choice.
    """

    visible: Tensor
    query_positions: Tensor
    key_positions: Tensor
    masks: int = 0

    def require_use(self, model: Any) -> None:
        """Refuse what a model computed without looking at the choice.

        Raises:
            ConfigError: no layer of the model took it.
        """
        if not self.masks:
            raise ConfigError(
                f"{type(model).__name__} does not make its attention masks with transformers' mask functions, so its layers cannot "
                "be told which tokens see each other."
            )


@contextmanager
def only_visible(choice: VisibleTokens) -> Iterator[VisibleTokens]:
    """Masks that models make in this thread meanwhile are combined with ``choice``.

    Pass the model a two-dimensional ``attention_mask`` or none, never one of four axes, which it would take as it is.

    Raises:
        ConfigError: in the model's forward pass, where a layer's mask cannot be combined with it.
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
    """transformers' function that makes the masks of an attention implementation, combined with the choice where there is one."""
    from transformers.masking_utils import eager_mask, flex_attention_mask, sdpa_mask

    @functools.wraps(make)
    def mask(*args: Any, **arguments: Any) -> Any:
        choice = _choice.get()
        if choice is None or getattr(arguments["mask_function"], "__name__", "") == "bidirectional_mask_function":  # vision
            return make(*args, **arguments)
        if make not in (sdpa_mask, eager_mask, flex_attention_mask):
            raise ConfigError(
                f"attn_implementation={name} has no mask that says which tokens of a row see each other (branch_ids): use sdpa."
            )
        allowed_BQK = choice.visible & _by_position(arguments["mask_function"], choice)
        if allowed_BQK.shape[1:] != (arguments["q_length"], arguments["kv_length"]):
            raise ConfigError(
                f"A layer's mask has {arguments['q_length']} queries and {arguments['kv_length']} keys, and what tokens see of each "
                f"other was given for {tuple(allowed_BQK.shape[1:])}: the model cannot compute rows with branches."
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
    """What a kind of layers sees of all tokens by their positions, causality apart. ``[B, Q, K]`` bool."""
    seen = choice.visible
    query, key = choice.query_positions[:, None, :, None], choice.key_positions[:, None, None, :]
    rows = query.new_zeros(1, 1, 1, 1) + query.new_tensor(range(len(query)))[:, None, None, None]
    for overlay in _overlays(mask_function):
        seen = seen & overlay(rows, 0, query, key)[:, 0]
    return seen


def _overlays(mask_function: Any) -> list[Callable[..., Tensor]]:
    """The windows that a causal mask function of transformers applies."""
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    if name == "causal_mask_function":
        return []
    if name in ("sliding_window_overlay.<locals>.inner_mask", "chunked_overlay.<locals>.inner_mask"):
        return [mask_function]
    if name == "and_masks.<locals>.and_mask":
        (parts,) = (cell.cell_contents for cell in mask_function.__closure__)
        return [overlay for part in parts for overlay in _overlays(part)]
    raise ConfigError(f"A layer's mask is made by {name.split('.')[0]}, which cannot be combined with branches (branch_ids).")
