"""Matching rows with the record: properties of conversations, groups and parallel paths."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended_engine import PretendedEngine, logprob_of

from rollwright import Experience
from rollwright.errors import TrajectoryError
from rollwright.experience.contract import check_trajectory
from rollwright.experience.normaliser import RowMatcher, normalise
from rollwright.experience.trajectory import trajectory_rows

TOOL = 100  # ids from here on are never sampled


def normal(result, recorder, **kwargs):
    trajectory = normalise(result, recorder, workflow="W", task="7", **kwargs)
    check_trajectory(trajectory, workflow="W", task="7")
    return trajectory


@st.composite
def conversations(draw):
    """A conversation: each turn's response may be cut, followed by tool text or not, and trained in whole, part or not."""
    return [
        {
            "length": draw(st.integers(1, 6)),
            "cut": draw(st.one_of(st.none(), st.integers(1, 6))),
            "tool": draw(st.integers(0, 3)),
            "dropped": draw(st.lists(st.integers(0, 5), max_size=3)),
            "extra": draw(st.integers(0, 2)),
        }
        for _ in range(draw(st.integers(1, 6)))
    ]


@settings(max_examples=150, deadline=None)
@given(turns=conversations(), seed=st.integers(0, 50), vocabulary=st.integers(1, 4), tools_are_foreign=st.booleans())
def test_conversations_get_the_log_probability_of_every_masked_token_in_its_context(turns, seed, vocabulary, tools_are_foreign):
    engine = PretendedEngine(seed, vocabulary)
    ids, mask = [0, 1], [0, 0]
    for turn in turns:
        for _ in range(turn["extra"]):  # resampled and thrown away
            engine.ask(ids, turn["length"])
        record = engine.ask(ids, turn["length"])
        kept = record.output_ids[: turn["cut"]]
        tool = [TOOL if tools_are_foreign else engine.random.randrange(vocabulary) for _ in range(turn["tool"])]
        ids = ids + kept + tool
        mask = mask + [int(index not in turn["dropped"]) for index in range(len(kept))] + [0] * len(tool)
    out = normal({"input_ids": ids, "loss_mask": mask, "reward": 1.0}, engine.recorder)
    expected = [logprob_of(ids[:index], token) if mask[index] else 0.0 for index, token in enumerate(ids)]
    assert out["logprobs"][0].tolist() == pytest.approx(expected, abs=1e-6)
    assert out["versions"][0].tolist() == [0 if masked else -1 for masked in mask]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    seed=st.integers(0, 50),
    order=st.randoms(),
    form=st.integers(0, 2),
)
def test_equal_responses_of_a_group_are_each_used_once(lengths, seed, order, form):
    engine = PretendedEngine(seed, vocabulary=2)
    records = []
    for index, length in enumerate(lengths):
        engine.version = index
        records.append(engine.ask([1, 0], length, rid=f"r{index}"))
    order.shuffle(records)
    if form == 0:
        result = [{"input_ids": record.prompt_ids, "output_ids": record.output_ids, "reward": 0} for record in records]
    elif form == 1:
        result = [Experience(tokens=record.prompt_ids + record.output_ids, prompt_length=2, reward=0) for record in records]
    else:
        result = {
            "input_ids": [record.prompt_ids + record.output_ids for record in records],
            "loss_mask": [[0, 0] + [1] * len(record.output_ids) for record in records],
            "rewards": torch.zeros(len(records)),
        }
    out = normal(result, engine.recorder)
    by_output: dict[tuple, list[int]] = {}
    for row, record in zip(trajectory_rows(out), records, strict=True):
        sampled = row["loss_mask"][0].bool()
        assert len(set(row["versions"][0][sampled].tolist())) == 1
        assert row["input_ids"][0][sampled].tolist() == record.output_ids
        by_output.setdefault(tuple(record.output_ids), []).append(int(row["versions"][0][-1]))
    for output, versions in by_output.items():
        prefixed = [record.versions[0] for record in records if tuple(record.output_ids[: len(output)]) == output]
        assert set(versions) <= set(prefixed)
        assert len(set(versions)) == len(versions)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 4), min_size=2, max_size=6), seed=st.integers(0, 50), order=st.randoms())
def test_given_log_probabilities_tell_equal_responses_apart(lengths, seed, order):
    engine = PretendedEngine(seed, vocabulary=2)
    records = []
    for index, length in enumerate(lengths):
        engine.version = index
        record = engine.ask([1, 0], length)
        record.output_logprobs[:] = [-0.5 - index - 0.01 * place for place in range(length)]
        records.append(record)
    order.shuffle(records)
    experiences = [
        Experience(tokens=record.prompt_ids + record.output_ids, prompt_length=2, reward=0, logprobs=record.logprobs)
        for record in records
    ]
    out = normal(experiences, engine.recorder)
    for row, record in zip(trajectory_rows(out), records, strict=True):
        assert row["versions"][0][2:].tolist() == record.versions


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 50),
    cut=st.booleans(),
    conclusion=st.booleans(),
    ending=st.sampled_from([[], [59]]),
)
def test_parallel_paths_are_matched_though_their_prompts_are_no_prefix(lengths, seed, cut, conclusion, ending):
    engine = PretendedEngine(seed, vocabulary=2)
    goal = engine.ask([0, 1], 4)
    trunk = [0, 1, *goal.output_ids, 50]
    ids, mask, expected = list(trunk), [0, 0, 1, 1, 1, 1, 0], [0.0, 0.0, *goal.logprobs, 0.0]
    paths = []
    for index, length in enumerate(lengths):
        engine.version = index + 1
        paths.append(engine.ask([*trunk, 60 + index, *ending], length, rid=f"path {index}"))
    versions = [-1, -1, 0, 0, 0, 0, -1]
    for index, path in enumerate(paths):
        kept = len(path.output_ids) - int(cut and len(path.output_ids) > 1)
        ids += [60 + index, *ending, *path.output_ids[:kept], 51]
        mask += [0] * (1 + len(ending)) + [1] * kept + [0]
        expected += [0.0] * (1 + len(ending)) + [*path.logprobs[:kept], 0.0]
        versions += [-1] * (1 + len(ending)) + [*path.versions[:kept], -1]
    if conclusion:
        end = engine.ask(ids, 3)
        ids, mask = ids + end.output_ids, mask + [1] * 3
        expected, versions = expected + end.logprobs, versions + end.versions
    out = normal({"input_ids": ids, "loss_mask": mask, "reward": 0}, engine.recorder)
    assert out["logprobs"][0].tolist() == pytest.approx(expected, abs=1e-6)
    assert out["versions"][0].tolist() == versions


@settings(max_examples=60, deadline=None)
@given(turns=conversations(), seed=st.integers(0, 50), data=st.data())
def test_any_foreign_masked_token_is_found(turns, seed, data):
    engine = PretendedEngine(seed, vocabulary=3)
    ids, mask = [0, 1], [0, 0]
    for turn in turns:
        record = engine.ask(ids, turn["length"])
        ids = ids + record.output_ids + [2] * turn["tool"]
        mask = mask + [1] * len(record.output_ids) + [0] * turn["tool"]
    spot = data.draw(st.integers(1, len(ids) - 1))
    ids = [*ids[:spot], TOOL, *ids[spot + 1 :]]
    mask = [*mask[:spot], 1, *mask[spot + 1 :]]
    with pytest.raises(TrajectoryError, match="were produced by no recorded request"):
        normal({"input_ids": ids, "loss_mask": mask, "reward": 0}, engine.recorder)


def test_a_resampled_branch_that_departs_takes_nothing_from_the_response_that_goes_on():
    engine = PretendedEngine(0)
    whole = engine.ask([1, 2], 4, output=[5, 6, 7, 8])
    engine.version = 1
    engine.ask([1, 2, 5], 2, output=[6, 9])
    out = normal({"input_ids": [1, 2], "output_ids": whole.output_ids, "reward": 0}, engine.recorder)
    assert out["versions"].tolist() == [[-1, -1, 0, 0, 0, 0]]


def test_a_response_that_was_cut_and_continued_has_two_versions():
    engine = PretendedEngine(0)
    engine.ask([1, 2], 4, output=[5, 6, 7, 8])
    engine.version = 1
    rest = engine.ask([1, 2, 5], 3, output=[6, 7, 9])
    out = normal({"input_ids": [1, 2], "output_ids": [5, *rest.output_ids], "reward": 0}, engine.recorder)
    assert out["versions"].tolist() == [[-1, -1, 0, 1, 1, 1]]


def test_text_slipped_in_before_a_response_is_refused():
    engine = PretendedEngine(0)
    record = engine.ask([1, 2], 3)
    row = {"input_ids": [1, 2, TOOL, *record.output_ids], "loss_mask": [0, 0, 0, 1, 1, 1], "reward": 0}
    with pytest.raises(TrajectoryError, match=r"positions 3 to 5.*sampled after token 2, not after 100"):
        normal(row, engine.recorder)


@settings(max_examples=60, deadline=None)
@given(turns=conversations(), seed=st.integers(0, 50))
def test_placements_never_overlap_and_say_what_the_record_says(turns, seed):
    engine = PretendedEngine(seed, vocabulary=2)
    ids, mask = [0, 1], [0, 0]
    for turn in turns:
        for _ in range(turn["extra"]):
            engine.ask(ids, turn["length"])
        kept = engine.ask(ids, turn["length"]).output_ids[: turn["cut"]]
        ids, mask = ids + kept + [1] * turn["tool"], mask + [1] * len(kept) + [0] * turn["tool"]
    placements = RowMatcher(engine.recorder.records).match(np.array(ids), np.array(mask, dtype=bool))
    end = 0
    for placement in placements:
        assert placement.start >= end
        end = placement.stop
        outputs = placement.record.output_ids[placement.offset : placement.offset + placement.stop - placement.start]
        assert ids[placement.start : placement.stop] == outputs
    assert len({placement.record.index for placement in placements}) == len(placements)


def test_a_history_rendered_anew_is_matched_by_output():
    """Chat templates drop old thoughts: the second prompt does not begin with the first row."""
    engine = PretendedEngine(5, vocabulary=9)
    first = engine.ask([20, 21, 22], 6)
    rendered = [20, 21, 22, *first.output_ids[3:], 23, 22]
    second = engine.ask(rendered, 4)
    ids = rendered + second.output_ids
    mask = [0] * 3 + [1] * 3 + [0] * 2 + [1] * 4
    out = normal({"input_ids": ids, "loss_mask": mask, "reward": 0}, engine.recorder)
    assert out["logprobs"][0].tolist() == pytest.approx([0, 0, 0, *first.logprobs[3:], 0, 0, *second.logprobs], abs=1e-6)


def test_one_response_may_be_in_several_rows():
    engine = PretendedEngine(6)
    trunk = engine.ask([1], 4)
    leaves = [engine.ask([1, *trunk.output_ids], 3) for _ in range(3)]
    rows = [{"input_ids": [1], "output_ids": trunk.output_ids + leaf.output_ids, "reward": 0} for leaf in leaves]
    out = normal(rows, engine.recorder)
    for row, leaf in zip(out["logprobs"].tolist(), leaves, strict=True):
        assert row == pytest.approx([0.0, *trunk.logprobs, *leaf.logprobs], abs=1e-6)


def test_long_conversations_are_matched_in_milliseconds():
    """A guard against quadratic matching, with a margin of twenty for slow machines; what others compute is not counted."""
    engine = PretendedEngine(7, vocabulary=250)
    ids, mask = [1] * 100, [0] * 100
    for _ in range(50):
        record = engine.ask([token % 256 for token in ids], 60)
        ids, mask = ids + record.output_ids + [9] * 100, mask + [1] * 60 + [0] * 100
    row = {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask), "reward": 0}
    seconds = []
    for _ in range(5):
        started = time.thread_time()
        normalise(row, engine.recorder)
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.1
