"""Packed batches: what a controller knows of rows without unpacking them, and the rows that come out again."""

import pytest
import torch

from rollwright.errors import TrajectoryError
from rollwright.experience.packed import as_packed, check_joined, pack_rows, packed_batch, parts_of, rows_of, unpacked
from rollwright.experience.trajectory import concat_padded_tensors, row_lengths, sampled_tokens, select_rows
from rollwright.training.micro_batches import all_tokens
from rollwright.training.rank_shares import shares


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


def test_a_packed_batch_knows_lengths_and_versions_and_gives_the_rows_back():
    samples = [made(4, 2), made(7, version=5), made(1)]
    batch = concat_padded_tensors([packed_batch(pack_rows(rows)) for rows in samples])
    assert row_lengths(batch).tolist() == [4, 2, 7, 1]
    assert sampled_tokens(batch).tolist() == [3, 1, 6, 0]
    assert batch["oldest_versions"].tolist() == [3, 4, 5, -1]
    whole = concat_padded_tensors(samples)
    assert torch.equal(batch["rewards"], whole["rewards"])
    for key, value in unpacked(batch).items():
        assert torch.equal(value, whole[key]), key
    chosen = unpacked(select_rows(batch, [3, 1, 0]))  # out of order, and of two parts
    assert chosen["input_ids"].tolist() == [row[:4] for row in whole["input_ids"][[3, 1, 0]].tolist()]
    assert unpacked(whole) is whole
    assert as_packed(batch) is batch


def test_ids_of_the_batch_are_those_of_the_rows_that_are_unpacked():
    batch = as_packed(made(3, 2, sample_ids=torch.tensor([0, 1])))
    batch["sample_ids"], batch["group_ids"] = torch.tensor([70, 71]), torch.tensor([7, 7])
    rows = unpacked(batch)
    assert (rows["sample_ids"].tolist(), rows["group_ids"].tolist()) == ([70, 71], [7, 7])


def test_details_keep_their_metrics_only():
    batch = as_packed(made(3, details=[{"metrics": {"score": 1.0}, "response_text": "long"}]))
    assert batch["details"] == [{"metrics": {"score": 1.0}}]
    assert unpacked(batch)["details"] == [{"metrics": {"score": 1.0}, "response_text": "long"}]


def test_a_batch_with_one_long_row_takes_little_more_room_than_its_tokens():
    batch = concat_padded_tensors([as_packed(made(20_000 if number == 7 else 20)) for number in range(512)])
    tokens = int(row_lengths(batch).sum())
    tensors = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
    packed = sum(map(len, parts_of(batch)[0]))
    assert tensors < 512 * 64
    assert packed < 24 * tokens + 512 * 1500


def test_whole_groups_are_divided_by_tokens_and_a_rank_without_rows_has_their_columns():
    batch = concat_padded_tensors([as_packed(made(length)) for length in (9, 9, 2, 2, 3, 3)])
    batch["group_ids"] = torch.tensor([1, 1, 2, 2, 3, 3])
    assert shares(batch, batch["group_ids"], 2, count_tokens=all_tokens) == [[0, 1], [2, 3, 4, 5]]
    of_ranks = shares(batch, batch["group_ids"], 4, count_tokens=all_tokens)
    assert sorted(map(len, of_ranks)) == [0, 2, 2, 2]
    parts, places = parts_of(select_rows(batch, [4, 5]))
    assert {key: (value.dtype, len(value)) for key, value in rows_of(parts, []).items()} == {
        key: (value.dtype, 0) for key, value in rows_of(parts, places).items()
    }


def test_rows_whose_columns_differ_cannot_be_joined():
    batch = concat_padded_tensors([as_packed(made(3)), as_packed(made(3, scores=torch.zeros(1, 2)))])
    with pytest.raises(TrajectoryError, match=r"some have the columns none and others scores \[2\] besides"):
        check_joined(batch)
    check_joined(concat_padded_tensors([as_packed(made(3)), as_packed(made(2))]))
