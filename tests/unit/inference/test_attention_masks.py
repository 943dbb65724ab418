"""Masks that a model makes for its layers, combined with a choice of visible tokens."""

import pytest
import torch
import transformers
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from rollwright.errors import ConfigError
from rollwright.inference.attention_masks import VisibleTokens, branch_attention, only_visible

BRANCHES = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2, 0]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4, 5, 6]])


def config(attention: str) -> transformers.MistralConfig:
    found = transformers.MistralConfig(sliding_window=3, hidden_size=8, num_attention_heads=2)
    found.attention_chunk_size = 4
    found._attn_implementation = attention
    return found


def mask(make, attention: str = "sdpa", **arguments) -> torch.Tensor:
    made = make(
        config(attention), torch.zeros(1, 10, 8), arguments.pop("attention_mask", torch.ones(1, 10).long()), None, **arguments
    )
    return made if made is None or made.dtype == torch.bool else made == 0


def choice() -> VisibleTokens:
    return VisibleTokens(branch_attention(BRANCHES), POSITIONS, POSITIONS)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("make", "is_near"),
    [
        (create_causal_mask, lambda query, key: True),
        (create_sliding_window_causal_mask, lambda query, key: key > query - 3),
        (create_chunked_causal_mask, lambda query, key: key // 4 == query // 4),
    ],
)
def test_each_kind_of_layer_keeps_its_window_by_position(attention, make, is_near):
    with only_visible(choice()) as chosen:
        found = mask(make, attention)
    assert chosen.masks == 1
    sees = branch_attention(BRANCHES)[0]
    for i, query in enumerate(POSITIONS[0].tolist()):
        for j, key in enumerate(POSITIONS[0].tolist()):
            assert bool(found[0, 0, i, j]) == bool(sees[i, j] and is_near(query, key)), (i, j)


def test_masks_are_transformers_own_where_nothing_is_chosen():
    with only_visible(choice()):
        pass
    assert mask(create_causal_mask) is None
    assert mask(create_sliding_window_causal_mask)[0, 0].sum(-1).tolist() == [1, 2] + [3] * 8


@pytest.mark.parametrize(
    ("attention", "arguments", "said"),
    [
        ("flash_attention_2", {}, "attn_implementation=flash_attention_2 cannot mask .* use sdpa"),
        ("sdpa", {"or_mask_function": lambda b, h, q, k: q == k}, "cannot be combined with branches"),
        ("sdpa", {"attention_mask": None, "position_ids": POSITIONS}, "cannot be combined with branches"),
    ],
)
def test_masks_that_cannot_be_combined_are_refused(attention, arguments, said):
    with only_visible(choice()), pytest.raises(ConfigError, match=said):
        mask(create_causal_mask, attention, **arguments)


def test_a_mask_of_another_size_is_refused():
    small = VisibleTokens(torch.ones(1, 4, 4, dtype=torch.bool), torch.arange(4)[None], torch.arange(4)[None])
    with only_visible(small), pytest.raises(ConfigError, match="10 queries and 10 keys"):
        mask(create_causal_mask)


def test_a_vision_tower_keeps_its_mask_and_a_model_that_looks_at_none_is_refused():
    with only_visible(choice()) as chosen:
        assert mask(create_bidirectional_mask) is None
    with pytest.raises(ConfigError, match="does not build its attention masks"):
        chosen.require_use(torch.nn.Linear(1, 1))
