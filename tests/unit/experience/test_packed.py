"""Rows of a trajectory as bytes: what travels between processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_trajectory_joining import make_rows

from rollwright.errors import TrajectoryError
from rollwright.experience.packed import pack_bytes, pack_rows, unpack_rows
from rollwright.experience.trajectory import select_rows, trim_padding


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[key].dtype, key
            assert torch.equal(value, other[key]), key
        elif key != "multi_modal_inputs":
            assert value == other[key], key


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_rows_come_back_as_they_were(lengths, data):
    batch = make_rows(lengths) | {
        "further": torch.rand(len(lengths), max(lengths), 3) * make_rows(lengths)["attention_mask"][..., None],
        "bonus": torch.rand(len(lengths)),
        "details": [{"metrics": {"n": float(length)}} for length in lengths],
    }
    rows = data.draw(st.lists(st.sampled_from(range(len(lengths))), max_size=8))
    assert_same(unpack_rows(pack_rows(batch)), trim_padding(batch))
    chosen = unpack_rows(pack_rows(batch, rows))
    width = max((lengths[row] for row in rows), default=1)
    assert_same(chosen, select_rows(batch, rows, width=width))


def test_images_go_with_their_row():
    batch = make_rows([3, 2, 4]) | {"multi_modal_inputs": [{"pixel_values": torch.rand(2, 5)}, None, {"grid": torch.ones(1)}]}
    images = unpack_rows(pack_rows(batch, [2, 0, 1]))["multi_modal_inputs"]
    assert torch.equal(images[0]["grid"], torch.ones(1))
    assert torch.equal(images[1]["pixel_values"], batch["multi_modal_inputs"][0]["pixel_values"])
    assert images[2] is None


def test_advantages_may_be_of_rows():
    batch = make_rows([3, 2]) | {"advantages": torch.tensor([0.5, -0.5])}
    assert unpack_rows(pack_rows(batch, [1]))["advantages"].tolist() == [-0.5]


def test_padding_takes_no_bytes():
    batch = make_rows([1000, *[10] * 63])
    padded = sum(value.numel() * value.element_size() for value in batch.values() if isinstance(value, torch.Tensor))
    assert len(pack_rows(batch)) < 0.05 * padded


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention_mask": torch.tensor([[False, True]])}, "not on the right"),
        ({"pixel_values": torch.ones(3, 2)}, r"'pixel_values' is \[3, 2\] for 1 rows"),
        ({"names": ["one", "two"]}, "'names' is list for 1 rows"),
        ({"details": [object()]}, "cannot be stored"),
    ],
)
def test_what_has_no_rows_is_refused(changed, message):
    batch = {"input_ids": torch.ones(1, 2, dtype=torch.int64), "attention_mask": torch.ones(1, 2, dtype=torch.bool)}
    with pytest.raises(TrajectoryError, match=message):
        pack_rows(batch | changed)


def test_a_type_that_the_format_has_not_is_named():
    with pytest.raises(TrajectoryError, match=r"spectrum: torch\.complex64 is no type of tensors that can be stored"):
        pack_bytes({"spectrum": torch.ones(2, dtype=torch.complex64)}, {})


def test_other_bytes_are_refused():
    with pytest.raises(TrajectoryError, match="no packed rows"):
        unpack_rows(pack_bytes({"tokens": torch.ones(2)}, {}))
    with pytest.raises(TrajectoryError, match="damaged or cut"):
        unpack_rows(pack_rows(make_rows([3, 2]))[:-4])
