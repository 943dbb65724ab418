"""Micro-batches hold every row once, within the budget, with little padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright.config.sections import MicroBatchSpec
from rollwright.errors import TrainingError
from rollwright.experience.trajectory import select_rows
from rollwright.training.micro_batches import micro_batches, ranks_of_groups, rows_of_ranks, split_minibatches, split_rows


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200), st.integers(1, 6), st.integers(1, 6))
def test_every_row_is_in_one_micro_batch_within_the_budget(lengths, budget, n_mbs, at_least):
    parts = split_rows(lengths, MicroBatchSpec(max_tokens_per_mb=budget, n_mbs=n_mbs), at_least=at_least)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert len(parts) >= max(at_least, min(n_mbs, len(lengths)))
    for part in parts:
        padded = len(part) * max((lengths[row] for row in part), default=0)
        assert padded <= budget or len(part) == 1


def test_rows_of_a_micro_batch_are_about_as_long_as_each_other():
    lengths = [1, 100, 2, 99, 3, 98]
    parts = split_rows(lengths, MicroBatchSpec(max_tokens_per_mb=300))
    assert [sorted(part) for part in parts] == [[1, 3, 5], [0, 2, 4]]


def test_columns_right_of_the_longest_row_are_cut():
    attention = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    batch = {
        "input_ids": torch.arange(12).view(3, 4),
        "attention_mask": attention,
        "rewards": torch.arange(3.0),
        "multi_modal_inputs": ["a", None, "c"],
        "note": "kept",
    }
    parts = micro_batches(batch, MicroBatchSpec(max_tokens_per_mb=6))
    assert [index.tolist() for index, _ in parts] == [[2], [1, 0]]
    shorter = parts[1][1]
    assert shorter["input_ids"].tolist() == [[4, 5, 6], [0, 1, 2]]
    assert shorter["rewards"].tolist() == [1.0, 0.0]
    assert shorter["multi_modal_inputs"] == [None, "a"]
    assert shorter["note"] == "kept"


def test_a_batch_as_long_as_wide_keeps_its_row_columns():
    batch = {"input_ids": torch.zeros(3, 3).long(), "rewards": torch.zeros(3)}
    assert select_rows(batch, [0], width=2)["rewards"].shape == (1,)


def test_minibatches_hold_whole_groups():
    batch = {"input_ids": torch.zeros(7, 2), "group_ids": torch.tensor([9, 4, 9, 4, 1, 1, 9])}
    parts = [part.tolist() for part in split_minibatches(batch, 2)]
    assert sorted(row for part in parts for row in part) == list(range(7))
    assert parts == [[0, 1, 2, 3, 6], [4, 5]]
    with pytest.raises(TrainingError, match=r"3 groups.*ppo_n_minibatches=4"):
        split_minibatches(batch, 4)


def test_minibatches_without_groups_are_by_rows():
    parts = split_minibatches({"input_ids": torch.zeros(4, 2)}, 2)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3]]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 3))
def test_ranks_have_about_as_many_tokens_and_as_many_groups_as_they_need(tokens, ranks, at_least):
    if len(tokens) < ranks * at_least:
        with pytest.raises(TrainingError, match="cannot be divided over"):
            ranks_of_groups(tokens, ranks, at_least=at_least)
        return
    chosen = ranks_of_groups(tokens, ranks, at_least=at_least)
    loads = [sum(t for t, r in zip(tokens, chosen, strict=True) if r == rank) for rank in range(ranks)]
    assert min(chosen.count(rank) for rank in range(ranks)) >= at_least
    if at_least == 1:  # no rank is above its even share by more than one group
        assert max(loads) <= sum(tokens) / ranks + max(tokens)


def test_rows_of_ranks_are_balanced_by_distinct_tokens_in_whole_groups():
    # Group 7 has many rows and few distinct tokens, group 3 few rows and many: by rows they would change sides.
    rows = [[1] * 10 + [end] for end in range(2, 10)] + [[20 + row] * 12 for row in range(2)] + [[40] * 9, [50] * 9]
    width = max(map(len, rows))
    batch = {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
        "group_ids": torch.tensor([7] * 8 + [3] * 2 + [5] + [4]),
    }
    first, second = rows_of_ranks(batch, 2)
    assert first.tolist() == [8, 9, 11]  # 24 + 9 distinct tokens
    assert second.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10]  # 18 + 9
    del batch["group_ids"]
    assert sorted(torch.cat(rows_of_ranks(batch, 3)).tolist()) == list(range(12))
