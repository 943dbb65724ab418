"""The loader: every task once an epoch, ordinals that only grow, resumes that skip and repeat nothing."""

import itertools
import json

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.config.tasksets import DatasetConfig
from rollwright.data.loader import TaskLoader
from rollwright.errors import CheckpointError, DataError


def rows(count):
    return [{"id": index} for index in range(count)]


def draw(loader, count):
    return [[(row["id"], row["ordinal"]) for row in batch] for batch in itertools.islice(loader.forever(), count)]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_resumed_loader_draws_what_the_other_would_have_drawn(data):
    size = data.draw(st.integers(1, 17))
    drop_last = data.draw(st.booleans())
    batch_size = data.draw(st.integers(1, size if drop_last else size + 3))
    arguments = {
        "batch_size": batch_size,
        "shuffle": data.draw(st.booleans()),
        "seed": data.draw(st.integers()),
        "drop_last": drop_last,
    }
    cut = data.draw(st.integers(0, 12))
    whole = draw(TaskLoader(rows(size), **arguments), cut + 8)
    first = TaskLoader(rows(size), **arguments)
    assert draw(first, cut) == whole[:cut]
    second = TaskLoader(rows(size), **arguments)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (second.ordinal, second.epoch) == (first.ordinal, first.epoch)
    assert draw(second, 8) == whole[cut:]
    ordinals = [ordinal for batch in whole for _, ordinal in batch]
    assert ordinals == list(range(len(ordinals)))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), st.integers(1, 5), st.booleans())
def test_an_epoch_draws_every_row_at_most_once_and_all_where_none_is_left_out(size, batch_size, drop_last):
    if drop_last and size < batch_size:
        return
    loader = TaskLoader(rows(size), batch_size, drop_last=drop_last)
    for epoch in range(3):
        assert loader.epoch == epoch
        batches = list(loader)
        assert len(batches) == len(loader)
        drawn = [row["id"] for batch in batches for row in batch]
        assert len(drawn) == len(set(drawn)) == (size // batch_size * batch_size if drop_last else size)


def test_orders_differ_by_epoch_and_seed_and_are_plain_without_shuffling():
    loader = TaskLoader(rows(32), 32, seed=1)
    first, second = draw(loader, 2)
    assert [i for i, _ in first] != [i for i, _ in second]
    assert draw(TaskLoader(rows(32), 32, seed=2), 1) != [first]
    assert draw(TaskLoader(rows(4), 2, shuffle=False), 2) == [[(0, 0), (1, 1)], [(2, 2), (3, 3)]]


def test_drawing_leaves_the_process_random_state_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    draw(TaskLoader(rows(4), 2), 5)
    assert torch.equal(before, torch.get_rng_state())


def test_rows_may_be_a_hugging_face_dataset_and_are_copied():
    dataset = datasets.Dataset.from_list(rows(6))
    assert [i for i, _ in draw(TaskLoader(dataset, 6, shuffle=False), 1)[0]] == list(range(6))
    own = rows(2)
    TaskLoader(own, 2).draw()[0]["id"] = "changed"
    assert own == rows(2)


def test_workers_that_read_ahead_change_nothing():
    arguments = {"batch_size": 3, "seed": 5}
    expected = draw(TaskLoader(rows(12), **arguments), 6)
    ahead = TaskLoader(rows(12), num_workers=1, **arguments)
    assert draw(ahead, 2) == expected[:2]
    resumed = TaskLoader(rows(12), **arguments)
    resumed.load_state_dict(ahead.state_dict())
    assert draw(resumed, 4) == expected[2:]


@pytest.mark.parametrize(
    ("content", "batch_size", "message"),
    [
        ([], 1, "has no rows"),
        (rows(3), 4, "has 3 rows, fewer than one batch of 4"),
        ([1, 2], 2, "row 0 is a int"),
        ([{"ordinal": 1}], 1, "a column 'ordinal'"),
    ],
)
def test_datasets_that_cannot_be_drawn_from(content, batch_size, message):
    with pytest.raises(DataError, match=message):
        TaskLoader(content, batch_size)


def test_a_state_of_other_data_is_refused():
    state = TaskLoader(rows(8), 2, seed=1).state_dict()
    with pytest.raises(CheckpointError, match="rows was 8, is 9"):
        TaskLoader(rows(9), 2, seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="seed was 1, is 2"):
        TaskLoader(rows(8), 2, seed=2).load_state_dict(state)


def test_from_config():
    loader = TaskLoader.from_config(rows(5), DatasetConfig(path="x", batch_size=2, shuffle=False, drop_last=False), seed=1)
    assert [len(batch) for batch in loader] == [2, 2, 1]
    with pytest.raises(DataError, match=r"x \(train\) has 5 rows"):
        TaskLoader.from_config(rows(5), DatasetConfig(path="x", batch_size=8), seed=1)
