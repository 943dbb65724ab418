"""Experience: construction, conversion and bytes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright import Experience
from rollwright.errors import TrajectoryError
from rollwright.experience.contract import check_trajectory
from rollwright.experience.experience import ExperienceId
from rollwright.experience.packed import pack_bytes
from rollwright.experience.trajectory import concat_padded_tensors


@st.composite
def experiences(draw):
    prompt, response = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    actions = draw(st.lists(st.booleans(), min_size=response, max_size=response))
    actions[0] = True
    logprobs = [-draw(st.floats(0, 20, width=32)) if action else 0.0 for action in actions]
    return Experience(
        tokens=draw(st.lists(st.integers(0, 2**31 - 1), min_size=prompt + response, max_size=prompt + response)),
        prompt_length=prompt,
        reward=draw(st.floats(-5, 5, width=32)),
        logprobs=logprobs,
        versions=[draw(st.integers(0, 99)) if action else -1 for action in actions],
        action_mask=actions,
        token_rewards=draw(st.one_of(st.none(), st.just([0.5] * response))),
        temperature=draw(st.sampled_from([0.5, 1.0])),
        truncated=draw(st.booleans()),
        info=draw(st.dictionaries(st.text(max_size=4), st.one_of(st.integers(), st.text(max_size=5), st.none()), max_size=3)),
        metrics={"turns": draw(st.floats(0, 9))},
        eid=ExperienceId(batch=1, task="t", run=2, step=3),
        messages=draw(st.one_of(st.none(), st.just([{"role": "user", "content": "é"}]))),
        multi_modal_inputs=draw(st.one_of(st.none(), st.just({"pixel_values": torch.ones(2, 3)}))),
        prompt_text="p",
        response_text="r",
    )


@settings(max_examples=50, deadline=None)
@given(experiences())
def test_bytes_give_back_the_experience(experience):
    data = experience.serialize()
    assert Experience.deserialize(data) == experience
    assert b"pickle" not in data


@settings(max_examples=50, deadline=None)
@given(st.lists(experiences(), min_size=1, max_size=4))
def test_rows_give_back_the_experiences(several):
    for experience in several:
        experience.token_rewards = experience.multi_modal_inputs = None
    batch = concat_padded_tensors([experience.to_trajectory() for experience in several])
    check_trajectory(batch)
    for back, original in zip(Experience.from_trajectory(batch), several, strict=True):
        for name in ("tokens", "prompt_length", "reward", "logprobs", "versions", "action_mask", "temperature", "truncated"):
            one, other = getattr(back, name), getattr(original, name)
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == pytest.approx(other), name


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda values: torch.tensor(values)[None]])
def test_sequences_may_be_lists_arrays_or_tensors(kind):
    experience = Experience(tokens=kind([1, 2, 3]), prompt_length=1, logprobs=kind([-0.1, -0.2]), reward=np.float32(1))
    assert experience.tokens.tolist() == [1, 2, 3]
    assert experience.logprobs.dtype == torch.float32
    assert (experience.reward, experience.response_length, len(experience)) == (1.0, 2, 3)
    assert experience.response_tokens.tolist() == [2, 3]
    assert experience.prompt_tokens.tolist() == [1]


def test_values_for_all_tokens_lose_the_prompts_part():
    experience = Experience(
        tokens=[1, 2, 3], prompt_length=2, logprobs=[0.0, 0.0, -1.0], action_mask=[0, 0, 1], versions=[-1, -1, 2]
    )
    assert (experience.logprobs.tolist(), experience.action_mask.tolist(), experience.versions.tolist()) == (
        [-1.0],
        [True],
        [2],
    )


def test_the_prompt_length_follows_from_what_covers_the_response():
    assert Experience(tokens=[1, 2, 3], logprobs=[-1.0]).prompt_length == 2
    assert Experience(tokens=[1, 2, 3], action_mask=[0, 1, 0]).prompt_length == 1
    assert Experience(tokens=[1, 2, 3]).prompt_length == 1
    assert Experience(tokens=[1, 2, 3], chosen=[4], rejected=[5]).prompt_length == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": None}, "'tokens': there are none"),
        ({"tokens": []}, "'tokens': there are none"),
        ({"tokens": [[1], [2]]}, r"'tokens': its shape is \[2, 1\]"),
        ({"tokens": [1.5, 2]}, "'tokens': its type is torch.float32; it holds integers"),
        ({"tokens": "abc"}, "'tokens': it is no sequence of numbers"),
        ({"prompt_length": 0}, "'prompt_length': 0 of 3 tokens"),
        ({"prompt_length": 4}, "'prompt_length': 4 of 3 tokens"),
        ({"logprobs": [-1.0]}, "'logprobs': 1 entries for 2 response tokens"),
        ({"action_mask": [1, 1, 1]}, "'action_mask': it marks prompt tokens as sampled"),
        ({"branch_ids": [1, 1]}, "'branch_ids': 2 entries for 3 tokens"),
        ({"reward": "good"}, "'reward': 'good' is no number"),
        ({"chosen": [1]}, "only one of chosen and rejected"),
    ],
)
def test_what_does_not_fit_is_refused_by_field(fields, message):
    with pytest.raises(TrajectoryError, match=message):
        Experience(**{"tokens": [1, 2, 3], "prompt_length": 1, **fields})


def test_a_row_needs_a_reward():
    with pytest.raises(TrajectoryError, match="'reward': there is none"):
        Experience(tokens=[1, 2], prompt_length=1).to_trajectory()


def test_masked_out_tokens_lose_their_log_probability_in_the_row():
    row = Experience(tokens=[1, 2, 3], prompt_length=1, logprobs=[-1.0, -2.0], versions=[4, 4], action_mask=[1, 0], reward=0)
    assert row.to_trajectory()["logprobs"].tolist() == [[0.0, -1.0, 0.0]]
    assert row.to_trajectory()["versions"].tolist() == [[-1, 4, -1]]


def test_preferences_survive_bytes():
    pair = Experience(tokens=[1, 2], chosen=[3, 4], rejected=[5], chosen_messages=[{"role": "assistant", "content": "a"}])
    assert Experience.deserialize(pair.serialize()) == pair


def test_numbers_of_numpy_and_torch_become_json_and_the_rest_is_named():
    experience = Experience(tokens=[1, 2], info={"a": np.int64(3), "b": torch.tensor([1.0]), "c": (1, 2)})
    assert Experience.deserialize(experience.serialize()).info == {"a": 3, "b": [1.0], "c": [1, 2]}
    experience.info = {"deep": [{"client": object()}]}
    with pytest.raises(TrajectoryError, match=r"info.deep\[0\].client: object cannot be stored"):
        experience.serialize()
    experience.info = {1: "x"}
    with pytest.raises(TrajectoryError, match="key 1 is no string"):
        experience.serialize()


def test_damaged_foreign_and_later_bytes_are_told_apart():
    data = Experience(tokens=[1, 2]).serialize()
    for damaged in (b"", data[:20], b"\x00" * 64, data[:-3]):
        with pytest.raises(TrajectoryError, match=r"damaged or cut|not 'rollwright"):
            Experience.deserialize(damaged)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["version"] = "99"
    later = json.dumps(header).encode()
    with pytest.raises(TrajectoryError, match=r"version 99 of the format.*update it"):
        Experience.deserialize(len(later).to_bytes(8, "little") + later + data[8 + size :])
    with pytest.raises(TrajectoryError, match="unknown fields"):
        Experience.deserialize(pack_bytes({"tokens": torch.ones(2, dtype=torch.int64)}, {"surprise": 1}))


def test_ids_name_group_and_sample():
    eid = ExperienceId(batch=4, task=7, run=1, step=0, suffix="x")
    assert (eid.group, eid.sample, str(eid)) == ("4/7", "4/7/1", "4/7/1/0/x")
