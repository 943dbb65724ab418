"""Frozen lakes: maps of each split, ways around the holes, and worked walks that are what the workflow makes of them."""

import asyncio
from pathlib import Path

import pytest
import yaml
from parts import Script, played
from worlds.frozen_lake import episode, lakes, shortest_way, whole_map

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import TasksetConfig
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import DataError

pytest.importorskip("gymnasium")
CONFIG = yaml.safe_load((Path(__file__).parents[3] / "examples/frozen_lake.yaml").read_text())
MODEL, _, GRPO = CONFIG["stages"]


def desc_of(task):
    return task["environment_args"]["desc"]


def test_no_two_splits_share_a_map_and_every_goal_can_be_reached():
    found = {split: lakes(split, size=40) for split in ("train", "valid", "test")}
    names = [task["query_id"] for tasks in found.values() for task in tasks]
    assert len(set(names)) == 120
    assert all(len(shortest_way(desc_of(task))) >= 6 for tasks in found.values() for task in tasks)
    assert found["test"] == lakes("test", size=40)
    with pytest.raises(DataError, match="no split 'dev'"):
        lakes("dev")
    with pytest.raises(DataError, match=r"only .* of split 'test' were found"):
        lakes("test", size=50, side=2)
    with pytest.raises(DataError, match="cannot be reached"):
        shortest_way(["SH", "HG"])


def test_the_shortest_way_goes_around_a_wall():
    assert shortest_way(["SHF", "FHF", "FFG"]) == ["down", "down", "right", "right"]
    assert shortest_way(["SFF", "FHF", "FHG"]) == ["right", "right", "down", "down"]
    assert whole_map(["SF", "HG"]) == "a1Sa2Fb1Hb2G"


def test_worked_walks_keep_dry_and_their_share():
    rows = lakes(size=20, worked=True, walks=5, knowing_share=0.2)
    assert len(rows) == 100
    ends = [row["segments"][-1]["text"] for row in rows]
    assert all(end in {f"{move}<|end|>" for move in ("left", "down", "right", "up")} for end in ends)
    shortest = [len(row["segments"]) == 2 * len(shortest_way(desc_of(row))) for row in rows]
    assert 20 <= sum(shortest) < 60  # a wanderer may take the shortest way, too


@pytest.mark.parametrize("knows", [True, False])
def test_a_worked_walk_is_what_the_workflow_makes_of_it(knows):
    tokenizer = build_character_tokenizer(MODEL["characters"], pieces=MODEL["pieces"])
    arguments = GRPO["tasksets"][0]["workflow_args"]
    for task in lakes("valid", size=5):
        segments = episode(desc_of(task), knows)
        said = [part["text"].removesuffix("<|end|>") for part in segments if part["train"]]
        taskset = TasksetConfig(
            workflow="environment_workflow", workflow_args=arguments, gconfig=GenerationHyperparameters(max_new_tokens=2)
        )
        [experience], row = asyncio.run(played(taskset, task, Script(tokenizer, *said), tokenizer))
        encoded = [(tokenizer.encode(part["text"], add_special_tokens=False), int(part["train"])) for part in segments]
        assert row["input_ids"][0].tolist() == [token for ids, _ in encoded for token in ids]
        assert tokenizer.unk_token_id not in row["input_ids"][0]
        assert row["loss_mask"][0].tolist() == [trained for ids, trained in encoded for _ in ids]
        assert experience.reward == float(knows or experience.metrics["finished"])
