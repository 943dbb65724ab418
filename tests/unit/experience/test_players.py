"""Rows say which player made them: nothing of an opponent is trained, and rows of different roles are never compared."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import TrajectoryError
from rollwright.experience.contract import check_trajectory
from rollwright.experience.experience import Experience
from rollwright.experience.normaliser import normalise
from rollwright.experience.operators import NoVarianceFilter
from rollwright.experience.packed import as_packed, unpacked
from rollwright.experience.players import comparison_groups, games_won, has_no_variance, role_id, rows_by_role, trainable_rows
from rollwright.experience.trajectory import concat_padded_tensors


def row(reward, **player):
    known = {"logprobs": [0.0, -0.5, -0.25], "versions": [-1, 3, 3]}
    return {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "rewards": reward, **known, **player}


def game(first, second, **of_second):
    of_both = {"environment": "nim"}
    rows = [
        row(first, agent="policy", role="first", **of_both),
        row(second, role="second", **of_both, **{"agent": "policy", **of_second}),
    ]
    trajectory = normalise([concat_padded_tensors([normalise(each, None) for each in rows])], None)
    trajectory["group_ids"], trajectory["sample_ids"] = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    check_trajectory(trajectory)
    return trajectory


def test_an_opponents_tokens_are_context():
    rows = game(1.0, -1.0, agent="version 0", trainable=False)
    assert rows["loss_mask"].tolist() == [[0, 1, 1], [0, 0, 0]]
    assert rows["versions"].tolist() == [[-1, 3, 3], [-1, -1, -1]]
    assert rows["logprobs"][1].tolist() == [0.0, 0.0, 0.0]
    assert trainable_rows(rows).tolist() == [True, False]
    assert rows["agent"] == ["policy", "version 0"]


def test_an_opponents_tokens_need_no_record():
    rows = normalise({"input_ids": [1, 2], "loss_mask": [0, 1], "rewards": 0.0, "trainable": False}, None)
    check_trajectory(rows)
    assert not rows["loss_mask"].any()


def test_the_contract_refuses_to_train_an_opponent():
    rows = game(1.0, -1.0, trainable=False)
    rows["loss_mask"][1, 1] = 1
    rows["versions"][1, 1] = 3
    with pytest.raises(TrajectoryError, match="row 1 is not trainable, but its loss_mask has tokens"):
        check_trajectory(rows)


@pytest.mark.parametrize("name", [3, ["first", "second"], [None]])
def test_a_name_is_text(name):
    with pytest.raises(TrajectoryError, match="key 'role'"):
        normalise(row(1.0, role=name), None)


def test_rows_with_and_without_players_are_joined():
    joined = concat_padded_tensors([game(1.0, 0.0, trainable=False), game(1.0, 0.0), dict_without_players()])
    check_trajectory(joined)
    assert joined["trainable"].tolist() == [True, False, True, True, True]
    assert joined["role"] == ["first", "second", "first", "second", ""]
    assert joined["role_ids"][4] == 0 == role_id("", "")
    assert joined["role_ids"][0] == joined["role_ids"][2] == role_id("nim", "first")


def dict_without_players():
    rows = normalise(row(0.5), None)
    rows["group_ids"] = rows["sample_ids"] = torch.ones(1, dtype=torch.int64)
    return rows


def test_packed_rows_keep_their_players():
    rows = game(1.0, -1.0, trainable=False)
    packed = as_packed(rows)
    assert packed["role"] == rows["role"]
    assert packed["trainable"].tolist() == [True, False]
    assert rows_by_role(packed) == rows_by_role(rows) == {"first": [0]}
    assert unpacked(packed)["role_ids"].tolist() == rows["role_ids"].tolist()


def test_experiences_keep_their_players():
    rows = game(1.0, -1.0, trainable=False)
    experiences = Experience.from_trajectory(rows)
    assert [(each.agent, each.role, each.environment, each.trainable) for each in experiences] == [
        ("policy", "first", "nim", True),
        ("policy", "second", "nim", False),
    ]
    assert Experience.deserialize(experiences[1].serialize()) == experiences[1]
    experiences[0].turn_ids = experiences[1].turn_ids = 2
    back = normalise(experiences, None)
    assert back["role_ids"].tolist() == rows["role_ids"].tolist()
    assert back["turn_ids"].tolist() == [2, 2]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), min_size=1))
def test_rows_are_compared_within_group_role_and_turn(keys):
    columns = [torch.tensor(each) for each in zip(*keys, strict=True)]
    groups = comparison_groups(*columns).tolist()
    for one, first in zip(keys, groups, strict=True):
        for other, second in zip(keys, groups, strict=True):
            assert (one == other) == (first == second)


def test_a_group_whose_sides_always_end_alike_has_no_variance():
    def group(*results):
        rows = concat_padded_tensors([game(result, -result) for result in results])
        rows["sample_ids"] = torch.arange(len(results)).repeat_interleave(2)
        return rows

    assert has_no_variance(group(1.0, 1.0, 1.0))  # 1 and -1 in every game
    assert not has_no_variance(group(1.0, -1.0, 1.0))
    kept, _ = NoVarianceFilter().process(Experience.from_trajectory(group(1.0, 1.0)))
    assert not kept
    kept, _ = NoVarianceFilter().process(Experience.from_trajectory(group(1.0, -1.0)))
    assert len(kept) == 4


def test_the_number_of_a_role_is_the_same_in_every_process():
    assert role_id("nim", "first") == 2746725130214799504
    assert role_id("nim", "first") != role_id("nimf", "irst")


def test_games_won_are_counted_by_sample_and_a_player_without_a_row_has_nothing():
    lost, won, draw = (game(*rewards, agent="old", trainable=False) for rewards in ((-1.0, 0.0), (2.0, -2.0), (0.0, 0.0)))
    alone = normalise([normalise(row(-1.0, agent="policy", trainable=True), None)], None)
    for number, each in enumerate((lost, won, draw, alone)):
        each["sample_ids"] = torch.full((len(each["rewards"]),), number)
    assert games_won([lost, won, draw, alone]) == (4, 1.5)
    joined = concat_padded_tensors([lost, won])
    assert games_won([joined, as_packed(draw)]) == (3, 1.5)
