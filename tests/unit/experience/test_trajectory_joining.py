"""Joining, cutting and moving trajectories."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import TrajectoryError
from rollwright.experience.trajectory import (
    COLUMNS,
    concat_padded_tensors,
    row_lengths,
    select_rows,
    tensor_container_to,
    trajectory_rows,
    trim_padding,
)


def make_rows(lengths: list[int], start: int = 1) -> dict:
    """A complete trajectory whose ids count upwards, so that every token can be told apart."""
    width = max(lengths)
    attention = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.arange(start, start + len(lengths) * width).reshape(len(lengths), width) * attention
    mask = (attention & (torch.arange(width) > 0)).to(torch.int32)
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "loss_mask": mask,
        "logprobs": -(ids.float() / 1000) * mask,
        "versions": torch.where(mask.bool(), torch.tensor(3, dtype=torch.int32), torch.tensor(-1, dtype=torch.int32)),
        "rewards": torch.arange(len(lengths), dtype=torch.float32),
        "temperature": torch.ones(len(lengths)),
        "truncated": torch.zeros(len(lengths), dtype=torch.bool),
        "features": torch.randn(len(lengths), width, 3) * attention[..., None],
        "names": [f"row {start}/{index}" for index in range(len(lengths))],
    }


shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)


@given(shapes)
def test_joined_rows_are_the_rows_of_the_items(groups):
    items = [make_rows(lengths, start=1 + 100 * index) for index, lengths in enumerate(groups)]
    joined = concat_padded_tensors(items)
    flat = [length for lengths in groups for length in lengths]
    assert joined["input_ids"].shape == (len(flat), max(flat))
    assert row_lengths(joined).tolist() == flat
    for key, column in COLUMNS.items():
        if key in joined and column.shape == "BL":
            assert bool((joined[key][~joined["attention_mask"]] == column.pad).all()), key
    originals = [row for item in items for row in trajectory_rows(item)]
    for row, original in zip(trajectory_rows(joined), originals, strict=True):
        assert row.keys() == original.keys()
        for key, value in row.items():
            same = torch.equal(value, original[key]) if isinstance(value, torch.Tensor) else value == original[key]
            assert same, key


@given(shapes)
def test_joining_is_associative(groups):
    items = [make_rows(lengths, start=1 + 100 * index) for index, lengths in enumerate(groups)]
    at_once = concat_padded_tensors(items)
    one_by_one = items[0]
    for item in items[1:]:
        one_by_one = concat_padded_tensors([one_by_one, item])
    for key, value in at_once.items():
        assert torch.equal(value, one_by_one[key]) if isinstance(value, torch.Tensor) else value == one_by_one[key]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_selected_rows_come_in_the_order_asked_for(lengths, data):
    order = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6))
    rows = make_rows(lengths)
    picked = select_rows(rows, order)
    assert picked["names"] == [rows["names"][index] for index in order]
    assert torch.equal(picked["input_ids"], rows["input_ids"][torch.tensor(order, dtype=torch.int64)])


def test_trimming_takes_away_padding_only():
    wide = concat_padded_tensors([make_rows([3]), make_rows([7])])
    short = trim_padding(select_rows(wide, [0]))
    assert short["input_ids"].tolist() == [[1, 2, 3]]
    assert short["features"].shape == (1, 3, 3)


def test_attention_mask_appears_where_padding_needs_one():
    joined = concat_padded_tensors([{"input_ids": torch.ones(1, 2)}, {"input_ids": torch.ones(2, 4)}])
    assert row_lengths(joined).tolist() == [2, 4, 4]


def test_images_are_joined_along_their_own_dimension_and_lists_row_by_row():
    first = {**make_rows([2]), "pixel_values": torch.ones(4, 6), "multi_modal_inputs": [{"image_grid_thw": torch.ones(1, 3)}]}
    second = {**make_rows([3, 1]), "pixel_values": torch.zeros(8, 6), "multi_modal_inputs": [None, None]}
    joined = concat_padded_tensors([first, second])
    assert joined["pixel_values"].shape == (12, 6)
    assert joined["multi_modal_inputs"][1:] == [None, None]


def test_unknown_token_columns_are_padded_with_the_value_asked_for():
    items = [{**make_rows([length]), "weights": torch.ones(1, length)} for length in (2, 4)]
    assert concat_padded_tensors(items, pad_value=-5)["weights"].tolist() == [[1, 1, -5, -5], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda item: item.pop("versions"), r"'versions' is in 1 of 2 items and missing in item 1"),
        (lambda item: item.update(loss_mask=torch.ones(1, 2)), r"'loss_mask' of item 1 is \[1, 2\], but input_ids is \[1, 3\]"),
        (lambda item: item.update(input_ids=torch.ones(3)), r"input_ids of item 1 is \[3\], not \[B, L\]"),
        (lambda item: item.update(rewards=torch.tensor(1.0)), r"'rewards' of item 1 is \[\] for 1 rows"),
        (lambda item: item.update(names=["a", "b"]), r"list 'names' of item 1 has 2 entries for 1 rows"),
        (lambda item: item.update(names="a"), r"'names' of item"),
        (lambda item: item.update(features=torch.ones(1, 3, 7)), r"'features' has shapes"),
    ],
)
def test_what_cannot_be_joined_is_named(change, message):
    broken = make_rows([3])
    change(broken)
    with pytest.raises(TrajectoryError, match=message):
        concat_padded_tensors([make_rows([3]), broken])


def test_a_response_appended_twice_is_refused_with_its_lengths():
    broken = {**make_rows([3]), "input_ids": torch.ones(1, 5, dtype=torch.int64)}
    with pytest.raises(TrajectoryError, match=r"is \[1, 3\], but input_ids is \[1, 5\].*appended to it twice"):
        concat_padded_tensors([broken])


@pytest.mark.parametrize(("items", "message"), [([], "empty list"), ([None], "item 0 is NoneType"), ([{}], "no input_ids")])
def test_nothing_to_join_is_an_error(items, message):
    with pytest.raises(TrajectoryError, match=message):
        concat_padded_tensors(items)


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


def test_containers_are_moved_at_every_depth_and_keep_their_types():
    inner = torch.ones(2)
    moved = tensor_container_to({"a": [inner, (inner, "text")], "b": Pair(inner, None), "c": 3}, torch.float64)
    assert moved["a"][0].dtype == moved["a"][1][0].dtype == moved["b"].left.dtype == torch.float64
    assert isinstance(moved["b"], Pair)
    assert moved["a"][1][1] == "text"
    assert moved["c"] == 3
    assert inner.dtype == torch.float32


def test_marks_that_an_item_leaves_out_are_false_there():
    plain, marked = make_rows([3, 2]), make_rows([4])
    marked["other_context"] = torch.tensor([[False, True, True, False]])
    marked["logprobs_shifted"] = torch.tensor([True])
    joined = concat_padded_tensors([plain, marked])
    assert joined["other_context"].tolist() == [[False] * 4, [False] * 4, [False, True, True, False]]
    assert joined["logprobs_shifted"].tolist() == [False, False, True]
    assert "other_context" not in plain


def test_rows_of_different_workflows_share_a_batch():
    """An agent's rows have rewards of tokens, a conversation's have none, a forked one's have branches: nothing is made up."""
    plain, rich = make_rows([4, 2]), make_rows([3], start=100)
    rich["token_rewards"] = torch.tensor([[0.0, 0.0, 0.5]])
    rich["branch_ids"] = torch.tensor([[0, 0, 1]])
    rich["position_ids"] = torch.tensor([[0, 1, 1]])
    rich["other_context"] = torch.tensor([[False, False, True]])
    rich["logprobs_shifted"] = torch.tensor([True])
    rich["multi_modal_inputs"] = [{"pixel_values": torch.ones(1)}]
    rich["details"] = [{"info": {"a": 1}, "metrics": {}}]
    for items in ([plain, rich], [rich, plain]):
        joined = concat_padded_tensors(items)
        own = 0 if items[0] is rich else 2
        others = [row for row in range(3) if row != own]
        assert joined["token_rewards"][own].tolist() == [0.0, 0.0, 0.5, 0.0]
        assert not joined["token_rewards"][others].any()
        assert not joined["branch_ids"][others].any()
        assert joined["position_ids"][others].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
        assert joined["logprobs_shifted"].tolist() == [row == own for row in range(3)]
        assert [joined["multi_modal_inputs"][row] for row in others] == [None, None]
        assert [joined["details"][row] for row in others] == [{}, {}]
