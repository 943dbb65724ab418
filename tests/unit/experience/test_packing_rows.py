"""Packing and unpacking are inverse, and boundaries say where rows are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import TrajectoryError
from rollwright.experience.packing import pack_rows, unpack_rows, unpack_tokens


def rows_of(lengths: list[int], width: int) -> dict:
    attention = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.arange(1, len(lengths) * width + 1).reshape(len(lengths), width) * attention
    versions = torch.where(attention, ids, -1).to(torch.int32)
    return {"input_ids": ids, "attention_mask": attention, "versions": versions, "rewards": torch.rand(len(lengths))}


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 3))
def test_unpacking_gives_back_what_was_packed(lengths, extra):
    rows = rows_of(lengths, max(lengths) + extra)
    packed = pack_rows(rows)
    assert packed["input_ids"].shape == (sum(lengths),)
    assert packed["max_seqlen"] == max(lengths)
    assert packed["cu_seqlens"].dtype == torch.int32
    for row, (start, stop) in enumerate(zip(packed["cu_seqlens"][:-1], packed["cu_seqlens"][1:], strict=True)):
        assert packed["input_ids"][start:stop].tolist() == rows["input_ids"][row, : lengths[row]].tolist()
        assert packed["position_ids"][start:stop].tolist() == list(range(lengths[row]))
    back = unpack_rows(packed, width=max(lengths) + extra)
    for key, value in rows.items():
        assert torch.equal(back[key], value), key


def test_own_positions_are_kept():
    rows = {**rows_of([2, 3], 3), "position_ids": torch.tensor([[7, 8, 0], [1, 1, 2]])}
    assert pack_rows(rows)["position_ids"].tolist() == [7, 8, 1, 1, 2]


def test_gradients_flow_through_unpacking():
    values = torch.arange(5.0, requires_grad=True)
    unpack_tokens(values, torch.tensor([0, 2, 5]), fill=-1).sum().backward()
    assert values.grad.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"input_ids": torch.ones(1, 2)}, "'attention_mask' is missing"),
        ({"input_ids": torch.ones(1, 2), "attention_mask": torch.tensor([[0, 1]])}, "padded on the right"),
    ],
)
def test_rows_that_cannot_be_packed_are_refused(rows, message):
    with pytest.raises(TrajectoryError, match=message):
        pack_rows(rows)


def test_values_that_do_not_fit_are_refused():
    with pytest.raises(TrajectoryError, match="4 values for 5 packed tokens"):
        unpack_tokens(torch.ones(4), torch.tensor([0, 2, 5]))
    with pytest.raises(TrajectoryError, match="does not fit into width 2"):
        unpack_tokens(torch.ones(5), torch.tensor([0, 2, 5]), width=2)
