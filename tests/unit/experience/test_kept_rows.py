"""Outlines: what a controller knows of rows whose tokens are elsewhere."""

import pytest
import torch

from rollwright.errors import LostProcessError
from rollwright.experience.contract import KEPT
from rollwright.experience.kept_rows import fetched, keep, places_of, rows_at
from rollwright.experience.trajectory import concat_padded_tensors, row_lengths, select_rows
from rollwright.placement.ranks import shares


class Store(dict):
    def put(self, data):
        self[len(self)] = data
        return len(self) - 1

    def get(self, references):
        return [dict.get(self, reference) for reference in references]


def made(*lengths, version=3, **columns):
    width, rows = max(lengths), len(lengths)
    mask_BL = torch.arange(width) < torch.tensor(lengths)[:, None]
    sampled_BL = mask_BL & (torch.arange(width) > 0)
    return {
        "input_ids": torch.randint(1, 99, (rows, width)) * mask_BL,
        "attention_mask": mask_BL,
        "loss_mask": sampled_BL.int(),
        "logprobs": torch.where(sampled_BL, -0.5, 0.0),
        "versions": torch.where(sampled_BL, torch.arange(width, dtype=torch.int32) % 2 + version, -1),
        "rewards": torch.rand(rows),
        "temperature": torch.ones(rows),
        "truncated": torch.zeros(rows, dtype=torch.bool),
        **columns,
    }


def test_an_outline_tells_lengths_and_versions_and_gives_the_rows_back():
    store, samples = Store(), [made(4, 2), made(7, version=5), made(1)]
    outline = concat_padded_tensors([keep(rows, store) for rows in samples])
    assert row_lengths(outline).tolist() == [4, 2, 7, 1]
    assert outline["sampled_tokens"].tolist() == [3, 1, 6, 0]
    assert outline["oldest_versions"].tolist() == [3, 4, 5, -1]
    whole = concat_padded_tensors(samples)
    assert torch.equal(outline["rewards"], whole["rewards"])
    for key, value in fetched(outline).items():
        assert torch.equal(value, whole[key]), key
    chosen = fetched(select_rows(outline, [3, 1, 0]))  # out of order, and of two parts
    assert chosen["input_ids"].tolist() == [row[:4] for row in whole["input_ids"][[3, 1, 0]].tolist()]
    assert fetched(whole) is whole


def test_ids_of_the_outline_are_those_of_the_rows_that_are_fetched():
    outline = keep(made(3, 2, sample_ids=torch.tensor([0, 1])), Store())
    outline["sample_ids"], outline["group_ids"] = torch.tensor([70, 71]), torch.tensor([7, 7])
    rows = fetched(outline)
    assert (rows["sample_ids"].tolist(), rows["group_ids"].tolist()) == ([70, 71], [7, 7])


def test_a_batch_with_one_long_row_takes_no_more_room_than_any_other():
    store = Store()
    outline = concat_padded_tensors([keep(made(20_000 if number == 7 else 20), store) for number in range(512)])
    assert sum(value.nbytes for value in outline.values() if isinstance(value, torch.Tensor)) < 512 * 64


def test_whole_groups_are_divided_by_tokens_and_a_rank_without_rows_has_their_columns():
    store = Store()
    outline = concat_padded_tensors([keep(made(length), store) for length in (9, 9, 2, 2, 3, 3)])
    outline["group_ids"] = torch.tensor([1, 1, 2, 2, 3, 3])
    assert shares(outline, outline["group_ids"], 2) == [[0, 1], [2, 3, 4, 5]]
    of_ranks = shares(outline, outline["group_ids"], 4)
    assert sorted(map(len, of_ranks)) == [0, 2, 2, 2]
    parts, places = places_of(select_rows(outline, [4, 5]))
    packed = store.get([part.reference for part in parts])
    assert {key: (value.dtype, len(value)) for key, value in rows_at([], packed).items()} == {
        key: (value.dtype, 0) for key, value in rows_at(places, packed).items()
    }


def test_rows_that_are_lost_are_not_taken_for_others():
    store = Store()
    outline = keep(made(3), store)
    store.clear()
    with pytest.raises(LostProcessError, match="rows are lost with the process that made them"):
        fetched(outline)
    assert outline[KEPT][0][1] == 0
