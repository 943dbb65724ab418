"""A recorded run as ``rollwright.Run`` shows it: the same that the journal and the metrics have."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from urllib.parse import parse_qsl

import numpy as np
import pytest
from recorded import STEPS, record_run

import rollwright
from rollwright.errors import DataError, JournalError
from rollwright.experience.journal.episodes import read_episodes
from rollwright.experience.journal.reading import read_records
from rollwright.experience.journal.records import Trained
from rollwright.viewer import sample_view, search
from rollwright.viewer.episodes import Episodes


@pytest.fixture
def run(recorded_run):
    with rollwright.Run(recorded_run) as run:
        run.refresh()
        yield run


def test_it_says_who_it_is_and_how_far(run, recorded_run):
    info = run.info()
    assert (info["name"], info["state"], info["last_step"], info["total_steps"]) == ("viewed/run", "finished", STEPS, STEPS)
    assert info["samples"] == 4 * 4 * STEPS + 1 + 2 * STEPS
    assert len(info["sparkline"]) == STEPS
    assert run.config["gconfig.n_samples"] == 4
    assert json.dumps(info)
    assert rollwright.Run(recorded_run.parent).path == recorded_run


def test_steps_have_their_groups_and_the_counts_add_up(run):
    steps = run.steps()
    assert [step["step"] for step in steps] == [1, 2, 3]
    recorded = dict(run.metrics(["reward"])["series"]["reward"])
    for entry in steps:
        step = run.step(entry["step"])
        assert entry["reward"] == pytest.approx(recorded[entry["step"]], abs=1e-6)
        assert step["counts"]["drawn"] == step["counts"]["trained"] + sum(step["counts"]["dropped"].values()) == 4
        assert sum(each["count"] for each in step["bins"]) == sum(each["trained"] for each in step["bins"]) == 16
        assert step["phases"].keys() >= {"generate", "train", "publish"}
        assert step["publication"]["way"] == "in place"
        assert step["publication"]["engines"] == ["BuiltinEngine in this process"]
        assert [group["key"] for group in step["evaluations"]] == [f"eval:{task}@v{entry['step']}" for task in (0, 1)]
        assert json.dumps(step)


def test_a_sample_has_every_token_with_what_engine_and_trainer_said(run, recorded_run):
    key = run.step(2)["groups"][1]["samples"][2]["key"]
    sample = run.sample(key)
    (row,) = sample["rows"]
    (episode,) = (
        each
        for each in read_episodes(recorded_run / "journal")
        if (each.begin.ordinal, each.begin.index, each.begin.is_eval) == (sample["ordinal"], sample["index"], False)
        and each.end.outcome == "accepted"
    )
    assert row["ids"] == episode.row_ids(episode.end.rows[0]).tolist()
    assert "".join(row["texts"]).startswith(sample["task"]["question"])
    sampled = [each for call in episode.calls for each in call.logprobs.tolist()]
    said = [value for value, trained in zip(row["logprobs"], row["mask"], strict=True) if trained]
    assert said == pytest.approx(sampled)
    for name in ("trainer_logprobs", "entropies", "advantages"):
        assert all((value is not None) == trained for value, trained in zip(row[name], row["mask"], strict=True))
    ours = np.array([value for value in row["trainer_logprobs"] if value is not None])
    np.testing.assert_allclose(ours, sampled, atol=1e-4)  # one step with the weights that sampled
    assert all(value > 0 for value in row["entropies"] if value is not None)
    assert {version for version in row["versions"] if version >= 0} == {1}
    assert [message["role"] for message in sample["messages"]] == ["given", "assistant", "tool", "given", "assistant"]
    assert (sample["results"][0]["name"], sample["tool_names"], sample["calls"][1]["turn"]) == ("calculator", ["calculator"], 1)
    assert sample["replay"].endswith(f"{recorded_run} {key}")
    assert json.dumps(sample)


def test_every_trained_row_was_trained_once(run, recorded_run):
    trained = [record for _, record in read_records(recorded_run / "journal") if isinstance(record, Trained)]
    found = run.search(step=(1, STEPS), limit=-1)["samples"]
    assert len(found) == len(trained) == 16 * STEPS
    assert {sample["trained"] for sample in found} == {1}
    assert sorted(sample["reward"] for sample in found) == sorted(record.reward for record in trained)
    shown = sorted(sample["advantage"] for sample in found)
    assert shown == pytest.approx(sorted(record.advantage for record in trained))


def test_a_failed_attempt_has_its_traceback_beside_the_one_that_followed(run):
    (failed,) = run.search(status="failed")["samples"]
    assert failed["key"].endswith("#0")
    sample = run.sample(failed["key"].partition("#")[0])
    assert (sample["status"], sample["attempt"]) == ("accepted", 1)
    first, second = sample["attempts"]
    assert (first["class"], first["message"]) == ("ValueError", "the calculator is broken")
    assert 'raise ValueError("the calculator is broken")' in first["traceback"]
    assert second["status"] == "accepted"


def test_the_tree_of_a_group_has_each_shared_token_once(run):
    for listed in run.step(1)["groups"]:
        group = run.group(listed["key"])
        nodes = group["tree"]["nodes"]
        rows = {
            sample["key"]: run.sample(sample["key"])["rows"][0] for sample in group["samples"] if sample["status"] == "accepted"
        }
        assert nodes[0]["start"] == 0
        assert sorted(nodes[0]["samples"]) == sorted(rows)
        assert not nodes[0]["trained"]
        for key, row in rows.items():
            own = [node for node in nodes if key in node["samples"]]
            assert sum(node["tokens"] for node in own) == len(row["ids"])
            for node in own:
                assert row["mask"][node["start"]] == node["trained"]
                parent = node["parent"]
                assert (parent is None) == (node["start"] == 0)
                assert parent is None or nodes[parent]["start"] + nodes[parent]["tokens"] == node["start"]
        leaves = {node["id"] for node in nodes} - {node["parent"] for node in nodes}
        assert len(leaves) == len({tuple(row["ids"]) for row in rows.values()})


def test_search_finds_words_patterns_and_what_filters_let_pass(run):
    assert run.search(text="3+3=", where="given")["total"] >= 4
    assert run.search(text="calculator")["total"] == 0
    found = run.search(regex=r"4\+4", where="given", is_eval=False, limit=100)
    assert found["total"] == len(found["samples"]) >= 4
    assert all(["4+4", True] in sample["snippet"] for sample in found["samples"])
    whole = run.search(regex=r"4\+4", where="given", is_eval=False, limit=-1)
    assert [sample["key"] for sample in whole["samples"]] == [sample["key"] for sample in found["samples"]]
    assert {sample["reward"] for sample in run.search(reward=(2, None), limit=-1)["samples"]} == {2.0}
    ordered = run.search(order="-reward", step=2, limit=-1)["samples"]
    assert [sample["reward"] for sample in ordered] == sorted((sample["reward"] for sample in ordered), reverse=True)
    assert run.search(is_eval=True)["total"] == 2 * STEPS
    assert run.search(tool="calc", version=2, is_eval=False)["total"] == 16
    assert run.search(offset=3, limit=4)["samples"] == run.search(limit=10)["samples"][3:7]


def test_a_pattern_without_end_is_ended(run, monkeypatch):
    endless = r"(?s:.|..|...)+[\x06\x07]"
    found = run.search(regex=endless)
    assert found["is_cut"]
    assert run.search(regex=r"(?:\d{1,40}\D{0,200}){2}", limit=-1)["total"]  # counted repeats that are no harm
    assert found["total"] is None
    assert not run.search(regex="4", limit=1)["is_cut"]
    monkeypatch.setattr(search, "_FRAME_SECONDS", 0.5)
    with pytest.raises(DataError, match="takes too long"):
        run.frame("samples", regex=endless)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"regex": "("}, "no regular expression"),
        ({"regex": "(a{10000}){10000}"}, "repeats too much"),
        ({"regex": "(?1)"}, "no regular"),
        ({"order": "colour"}, "choose from"),
        ({"where": "x"}, "any, given"),
    ],
)
def test_a_wrong_search_is_told(run, query, words):
    with pytest.raises(DataError, match=words):
        run.search(**query)


@pytest.mark.parametrize("key", ["99/0", "0/77", "eval:0/0@v9"])
def test_what_is_not_there_is_told(run, key):
    with pytest.raises(DataError, match=f"no sample {key}"):
        run.sample(key)
    with pytest.raises(DataError, match="names no sample"):
        run.sample("../../etc/passwd")
    with pytest.raises(DataError, match="no step 99"):
        run.step(99)


def test_the_timeline_has_the_phases_and_every_call(run):
    drawn = run.timeline()
    lanes = {lane["name"]: lane for lane in drawn["lanes"]}
    kinds = {span["kind"] for span in lanes["trainer"]["spans"]}
    assert kinds >= {"generate", "train", "publish"}
    began = [span["start"] for span in lanes["trainer"]["spans"] if span["kind"] == "train"]
    assert began == sorted(began)
    assert len(lanes["engine in this process"]["spans"]) == 2 * (16 * STEPS + 2 * STEPS)
    assert len(lanes["tools"]["spans"]) == 16 * STEPS + 2 * STEPS
    for lane in drawn["lanes"]:
        if lane["kind"] == "sampling":
            ends = [(span["start"], span["end"]) for span in lane["spans"]]
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))
        assert 0.0 <= drawn["busy"][lane["name"]] <= 1.0


def test_tokens_are_written_once(recorded_run):
    assert [path.suffix for path in sorted((recorded_run / "rollouts").glob("step-*"))] == [".txt"] * STEPS


def test_metrics_have_how_samples_ended(run, recorded_run):
    counts = {name: dict(run.curves.points(name)) for name in run.curves.names() if name.startswith(("samples/", "groups/"))}
    assert counts["samples/accepted"] == dict.fromkeys((1, 2, 3), 16.0)  # without evaluation
    assert counts["groups/accepted"] == dict.fromkeys((1, 2, 3), 4.0)
    assert sum(counts["samples/retried"].values()) == run.search(status="failed")["total"] == 1
    assert set(counts["groups/failed"].values()) == {0.0}


def test_a_collapse_is_told_with_its_beginning_and_the_samples_that_show_it(tmp_path, tiny_model):
    with rollwright.Run(record_run(tmp_path, tiny_model, steps=12, good_until=6)) as run:
        run.refresh()
        signs = {sign["rule"]: sign for sign in run.diagnosis()}
        decline = signs["decline"]
        assert decline["level"] == "bad"
        assert decline["began"] in (6, 7)  # the samples of step 7 are of version 6
        assert decline["message"].startswith("The reward fell from ")
        assert "actor.optimizer.lr (0.001)" in decline["message"]
        assert not any("too hard" in sign["message"] for sign in signs.values())
        assert "waits_for_samples" not in signs
        found = run.search(**search.filters(dict(parse_qsl(decline["samples"]))), limit=200)
        assert {sample["step"] for sample in found["samples"]} == set(range(decline["began"], 13))
        assert {sample["reward"] for sample in found["samples"] if sample["step"] >= 7} == {0.0}


def test_frames_are_for_notebooks(run):
    samples, tokens = run.frame("samples"), run.frame("tokens", step=1)
    assert samples[samples.step.notna()].groupby("step").size().tolist() == [16] * STEPS
    assert (tokens[tokens.trained].trainer_logprob - tokens[tokens.trained].logprob).abs().max() < 1e-4
    assert "reward" in run.frame("metrics").columns
    assert len(run.frame("publications")) == STEPS
    assert len(run.frame("samples", eval=1)) == 2 * STEPS
    assert run.frame("samples", eval=0, step="1-2", order="-reward").step.isin([1, 2]).all()
    assert len(run.frame("samples", text="4.4", regex=1)) == len(run.frame("samples", regex="4.4")) > 0
    with pytest.raises(DataError, match="not found by 'colour': choose from eval"):
        run.frame("samples", colour="red")
    with pytest.raises(DataError, match="step: 'x' is no number"):
        run.frame("samples", step="x")
    with pytest.raises(DataError, match="choose from samples"):
        run.frame("groups")


def test_looking_at_a_run_loads_no_torch(recorded_run):
    look = f"""
import sys, rollwright
run = rollwright.Run({str(recorded_run)!r})
run.refresh(); run.sample(run.step(1)["groups"][0]["samples"][0]["key"]); run.search(text="1"); run.timeline(); run.diagnosis()
assert not {{"torch", "transformers"}} & set(sys.modules), "loaded"
"""
    subprocess.run([sys.executable, "-c", look], check=True, timeout=200)


def test_it_says_where_a_sample_left_all_that_are_better(run):
    told = 0
    for group in run.step(2)["groups"]:
        samples = {each["key"]: run.sample(each["key"]) for each in group["samples"]}
        ids = {key: sample["rows"][0]["ids"] for key, sample in samples.items() if sample["rows"]}
        for key, sample in samples.items():
            better = {each for each in ids if samples[each]["reward"] > sample["reward"]}
            if not better:
                assert sample["parts"] is None
                continue
            shared = {
                each: sum(
                    1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids[key], ids[each], strict=False))
                )
                for each in better
            }
            assert sample["parts"]["token"] == max(shared.values())
            assert shared[sample["parts"]["key"]] == sample["parts"]["token"]
            assert sample["parts"]["better"] == sample["parts"]["compared"] == len(better)
            told += 1
    assert told


def worst_and_better(run):
    """The worst sample of the group where most others have a higher reward, and these, best first."""
    found = []
    for step in run.steps():
        for group in run.step(step["step"])["groups"]:
            samples = sorted(
                (each for each in group["samples"] if each["reward"] is not None), key=lambda each: -each["reward"]
            )
            found.append((samples[-1], [each for each in samples if each["reward"] > samples[-1]["reward"]]))
    return max(found, key=lambda each: len(each[1]))


def test_what_is_said_of_better_samples_is_said_of_those_that_were_compared(run, monkeypatch):
    worst, better = worst_and_better(run)
    assert len(better) > 1
    assert sample_view.left(run.sample(worst["key"])["parts"]) == "every better sample of its task"
    monkeypatch.setattr("rollwright.viewer.episodes._COMPARED", 1)
    parts = run.sample(worst["key"])["parts"]
    assert parts["reward"] == better[0]["reward"]
    assert sample_view.left(parts).startswith(f"1 of the {len(better)} better samples")


def test_a_sample_is_shown_where_the_records_of_better_ones_are_gone(run, monkeypatch):
    """``journal.keep`` removes whole files, and the samples of a group may be in two."""
    worst, (best, *_) = worst_and_better(run)
    recorded = Episodes.at

    def without_the_better(episodes, key, places):
        if key != worst["key"]:
            raise JournalError(f"the records of sample {key} cannot be read")
        return recorded(episodes, key, places)

    assert run.sample(worst["key"])["parts"] is not None
    monkeypatch.setattr(Episodes, "at", without_the_better)
    shown = run.sample(worst["key"])
    assert shown["rows"]
    assert shown["parts"] is None
    with pytest.raises(JournalError):
        run.sample(best["key"])
