"""The normaliser: every accepted form, every key that is filled, every lie that is told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pretended_engine import PretendedEngine

from rollwright import Experience
from rollwright.errors import TrajectoryError
from rollwright.experience.contract import check_trajectory
from rollwright.experience.normaliser import normalise
from rollwright.experience.recorder import Recorder
from rollwright.experience.trajectory import concat_padded_tensors

TOOL = 100  # ids from here on are never sampled


def normal(result, recorder, **kwargs):
    trajectory = normalise(result, recorder, workflow="W", task="7", **kwargs)
    check_trajectory(trajectory, workflow="W", task="7")
    return trajectory


def one_turn():
    engine = PretendedEngine(0)
    engine.version = 4
    record = engine.ask([1, 2], 3, stop_reason="length")
    ids = [1, 2, *record.output_ids]
    return engine, record, {"input_ids": ids, "loss_mask": [0, 0, 1, 1, 1], "rewards": 0.5}


# -- forms -----------------------------------------------------------------------------------------------------------------


def test_none_is_a_rejection():
    assert normalise(None, Recorder()) is None


def test_what_is_left_out_is_filled_from_the_record():
    engine, record, row = one_turn()
    out = normal(row, engine.recorder)
    assert list(out) == [
        "input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards", "temperature", "truncated",
    ]  # fmt: skip
    assert out["logprobs"].tolist()[0] == pytest.approx([0, 0, *record.logprobs])
    assert out["versions"].tolist() == [[-1, -1, 4, 4, 4]]
    assert out["temperature"].tolist() == pytest.approx([0.7])
    assert out["truncated"].tolist() == [True]
    assert out["rewards"].tolist() == [0.5]
    assert out["attention_mask"].all()


def test_rows_of_shifted_log_probabilities_are_marked():
    engine, record, row = one_turn()
    assert "logprobs_shifted" not in normal(row, engine.recorder)
    record.logprobs_shifted = True
    assert normal(row, engine.recorder)["logprobs_shifted"].tolist() == [True]
    (experience,) = Experience.from_trajectory(normal(row, engine.recorder))
    assert Experience.deserialize(experience.serialize()).to_trajectory()["logprobs_shifted"].tolist() == [True]


@pytest.mark.parametrize(
    "form",
    [
        lambda row, output: row,
        lambda row, output: {key: torch.tensor(value) for key, value in row.items()},
        lambda row, output: {key: torch.tensor(value)[None] for key, value in row.items()},
        lambda row, output: {
            **{key: np.array(value) for key, value in row.items()},
            "loss_mask": np.array(row["loss_mask"], bool),
        },
        lambda row, output: {"input_ids": [row["input_ids"]], "loss_mask": [row["loss_mask"]], "reward": [0.5]},
        lambda row, output: {"input_ids": [1, 2], "output_ids": output, "reward": 0.5},
        lambda row, output: {
            "input_ids": torch.tensor([1, 2]),
            "output_ids": torch.tensor(output),
            "reward": torch.tensor(0.5),
        },
        lambda row, output: Experience(tokens=row["input_ids"], prompt_length=2, reward=0.5),
        lambda row, output: [Experience(tokens=torch.tensor(row["input_ids"]), action_mask=row["loss_mask"], reward=0.5)],
        lambda row, output: [row],
    ],
)
def test_all_forms_give_the_same_row(form):
    engine, record, row = one_turn()
    wanted = normal(row, engine.recorder)
    out = normal(form(row, record.output_ids), engine.recorder)
    assert out.keys() - {"details"} == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(out[key], value), key
        assert out[key].dtype == value.dtype, key


def test_ragged_lists_are_padded_row_by_row():
    engine = PretendedEngine(1)
    records = [engine.ask([1, 2], length) for length in (2, 5)]
    rows = {
        "input_ids": [record.prompt_ids + record.output_ids for record in records],
        "loss_mask": [[0, 0] + [1] * len(record.output_ids) for record in records],
        "rewards": [0.0, 1.0],
    }
    out = normal(rows, engine.recorder)
    assert out["attention_mask"].sum(1).tolist() == [4, 7]
    rows["loss_mask"][1] = rows["loss_mask"][1][:-1]
    with pytest.raises(TrajectoryError, match=r"lengths disagree: input_ids \[4, 7\], loss_mask \[4, 6\]"):
        normal(rows, engine.recorder)


def test_one_reward_goes_to_all_rows_and_own_columns_stay():
    engine = PretendedEngine(2)
    records = [engine.ask([1, 2], 3) for _ in range(2)]
    out = normal(
        {
            "input_ids": torch.tensor([record.prompt_ids + record.output_ids for record in records]),
            "loss_mask": torch.tensor([[0, 0, 1, 1, 1]] * 2),
            "reward": 1,
            "hint": torch.tensor([3, 4]),
            "turn": torch.zeros(2, 5),
            "question": "who?",
        },
        engine.recorder,
    )
    assert out["rewards"].tolist() == [1.0, 1.0]
    assert (out["hint"].tolist(), out["question"], out["turn"].shape) == ([3, 4], ["who?", "who?"], (2, 5))


def test_images_of_one_row_move_into_its_list():
    engine, _, row = one_turn()
    out = normal({**row, "pixel_values": torch.ones(16, 8), "image_grid_thw": torch.ones(1, 3)}, engine.recorder)
    assert set(out["multi_modal_inputs"][0]) == {"pixel_values", "image_grid_thw"}
    joined = concat_padded_tensors([out, out])
    assert len(joined["multi_modal_inputs"]) == 2


def test_experiences_with_and_without_branches_are_joined():
    engine, _, row = one_turn()
    plain = Experience(tokens=row["input_ids"], prompt_length=2, reward=0.0)
    branched = Experience(tokens=row["input_ids"], prompt_length=2, reward=1.0, branch_ids=[0, 0, 1, 1, 1])
    out = normal([plain, branched], engine.recorder)
    assert out["branch_ids"].tolist() == [[0] * 5, [0, 0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (3.5, "returned float; return a dict"),
        ([], "empty list; return None to reject"),
        (["a"], "it is str in a list"),
        ({"loss_mask": [0, 1], "reward": 0}, "'input_ids': it is missing; there are loss_mask, reward"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1]}, "'rewards': there is no reward"),
        ({"input_ids": [1, 2], "reward": 0}, "'loss_mask': it is missing"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0], "reward": "good"}, "'rewards': 'good' is no number"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0], "reward": [1, 2, 3]}, r"'rewards': its shape is \[3\] for 1 rows"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0], "reward": 1, "rewards": 1}, "another name for|is there too"),
        ({"input_ids": [1.5, 2], "loss_mask": [0, 0], "reward": 1}, "'input_ids': it is torch.float64"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0.5], "reward": 1}, "'loss_mask': it holds values other than 0 and 1"),
        ({"input_ids": [], "loss_mask": [], "reward": 1}, "no tokens"),
        ({"input_ids": "text", "loss_mask": [0], "reward": 1}, "'input_ids'"),
        ({"input_ids": [1], "output_ids": [], "reward": 1}, "neither may be empty"),
        ({"input_ids": [[1], [2]], "output_ids": [[1], [2]], "reward": 1}, "the short form has ids in one dimension"),
        ({"input_ids": [[1, 2]], "loss_mask": [0, 1], "reward": 1}, r"'loss_mask': its shape is \[2\]"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0], "reward": 1, "extra": torch.ones(5)}, r"'extra': its shape is \[5\]"),
    ],
)
def test_a_wrong_form_is_refused_by_workflow_task_and_key(result, message):
    with pytest.raises(TrajectoryError, match=message) as caught:
        normalise(result, PretendedEngine(0).recorder, workflow="W", task="7")
    assert "workflow W, task 7" in str(caught.value)


# -- what the record contradicts -------------------------------------------------------------------------------------------


def test_a_response_appended_twice_is_told_plainly():
    engine, record, row = one_turn()
    with pytest.raises(TrajectoryError, match=r"input_ids \[1, 8\], loss_mask \[1, 5\].*appended to input_ids twice"):
        normal({**row, "input_ids": row["input_ids"] + record.output_ids}, engine.recorder)


def test_a_response_that_stands_twice_with_its_mask_is_refused_too():
    engine, record, row = one_turn()
    twice = {"input_ids": row["input_ids"] + record.output_ids, "loss_mask": row["loss_mask"] + [1] * 3, "rewards": 0}
    with pytest.raises(TrajectoryError, match="already stands elsewhere in this row"):
        normal(twice, engine.recorder)


def test_a_masked_token_that_nobody_sampled_is_placed_and_decoded():
    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return " ".join(f"<{i}>" for i in ids)

    engine, _, row = one_turn()
    row = {"input_ids": row["input_ids"] + [TOOL, TOOL], "loss_mask": row["loss_mask"] + [0, 1], "rewards": 0}
    with pytest.raises(TrajectoryError, match=r"row 0, positions 6 to 6: the masked tokens \[100\] \('<100>'\)"):
        normal(row, engine.recorder, tokenizer=Tokenizer())


def test_encoded_again_is_told_where_it_departs():
    engine = PretendedEngine(0)
    engine.ask([1, 2], 4, output=[5, 6, 7, 8])
    with pytest.raises(TrajectoryError, match=r"positions 4 to 5.*never decoded and encoded again|produced by no recorded"):
        normal(
            {"input_ids": [1, 2, 5, 6, 9, 8], "output_ids": [1], "reward": 0}
            | {"output_ids": [5, 6, 9, 8], "input_ids": [1, 2]},
            engine.recorder,
        )


def test_a_sample_that_never_asked_its_engine_is_told_so():
    with pytest.raises(TrajectoryError, match="made no request through the engine that it was handed"):
        normal({"input_ids": [1], "output_ids": [2], "reward": 0}, Recorder())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"logprobs": [0.0, 0, -9, -9, -9]},
            "'logprobs': 3 of 3 values are not those of the record, first at row 0, position 2",
        ),
        ({"logprobs": [0.0] * 5}, "all of them are 0: return resp.output_logprobs"),
        ({"logprobs": [0.0, 0, float("nan"), 0, 0]}, "'logprobs': 3 of 3 values"),
        ({"versions": [-1, -1, 4, 4, 5]}, "'versions': 1 of 3 values.*position 4: the workflow gave 5, the engine 4"),
        ({"temperature": 1.0}, "'temperature': 1 of 1 values.*the workflow gave 1, the engine 0.7"),
    ],
)
def test_a_workflow_that_gets_it_wrong_is_told(change, message):
    engine, _, row = one_turn()
    with pytest.raises(TrajectoryError, match=message):
        normal({**row, **change}, engine.recorder)


def test_what_the_workflow_got_right_passes():
    engine, record, row = one_turn()
    given = {"logprobs": [0.0, 0.0, *record.logprobs], "versions": [-1, -1, 4, 4, 4], "temperature": 0.7, "truncated": False}
    out = normal({**row, **given}, engine.recorder)
    assert out["truncated"].tolist() == [False]  # the workflow's own word stands


def test_two_temperatures_in_a_row_are_refused():
    engine = PretendedEngine(0)
    first = engine.ask([1], 2, temperature=0.7)
    second = engine.ask([1, *first.output_ids], 2, temperature=1.0)
    row = {"input_ids": [1], "output_ids": first.output_ids + second.output_ids, "reward": 0}
    with pytest.raises(TrajectoryError, match=r"row 0 holds responses sampled at temperatures 0\.7, 1"):
        normal(row, engine.recorder)


def test_without_a_record_the_workflow_must_bring_the_truth():
    row = {"input_ids": [1, 2], "loss_mask": [0, 1], "reward": 0}
    with pytest.raises(TrajectoryError, match="there is no record of its requests"):
        normal(row, None)
    out = normal({**row, "logprobs": [-3.0, -1.0], "versions": [5, 5]}, None)
    assert out["logprobs"].tolist() == [[0.0, -1.0]]
    assert out["versions"].tolist() == [[-1, 5]]


def test_a_row_is_truncated_where_its_last_response_was_and_stands_whole():
    engine = PretendedEngine(3)
    first = engine.ask([1], 3, stop_reason="length")
    second = engine.ask([1, *first.output_ids, TOOL], 3, stop_reason="stop")
    whole = [1, *first.output_ids, TOOL, *second.output_ids]
    mask = [0, 1, 1, 1, 0, 1, 1, 1]
    rows = [(whole, mask), (whole[:4], mask[:4]), (whole[:3], mask[:3])]
    out = normal([{"input_ids": ids, "loss_mask": loss, "reward": 0} for ids, loss in rows], engine.recorder)
    assert out["truncated"].tolist() == [False, True, False]
