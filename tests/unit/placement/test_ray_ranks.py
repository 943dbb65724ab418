"""The ranks of a training on a cluster, where a process of them is lost: at the start, at the first load, and later."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from rollwright.config.experiment import FinetuneSpec, GRPOConfig
from rollwright.config.sections import ClusterConfig, RolloutConfig
from rollwright.errors import EngineError, LostProcessError, LostRankError, RolloutError
from rollwright.experience.packed_batch import as_packed, rows_of
from rollwright.experience.trajectory import concat_padded_tensors
from rollwright.placement import ray_ranks
from rollwright.placement.capacity import Node
from rollwright.placement.ranks import TRAINED
from rollwright.placement.ray_ranks import PlacedRanks
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training.publish_and_audit import Publication


class Rank:
    """A rank that keeps what it is asked, and fails as it is told: ``fails`` has what it was asked, and the error."""

    def __init__(self, number, fails):
        self.name, self.asked, self._fails = f"rank {number}", [], fails
        self.version, self.publication, self.taken = 0, None, []

    def wait_started(self, timeout):
        if "start" in self._fails:
            raise self._fails["start"]

    def call(self, method, *arguments):
        name = arguments[0] if method == "call" else method
        self.asked.append(name)
        answer = Future()
        if method == "call" and arguments[1] is not None:
            parts, places, _ = arguments[1]
            self.taken.append(rows_of(parts, places)["input_ids"].tolist())
        if (error := self._fails.get(name)) is None:
            answer.set_result(self._answer(name))
        elif error != "nothing":  # it waits for ever for the one that was lost
            answer.set_exception(error)
        return answer

    def _answer(self, name):
        answers = {"meeting_place": ("10.0.0.1", 1), "open": "float32", "holders": (self.version, ["a:1"])}
        if name in answers:
            return answers[name]
        if name in ("publish", "skip_publication"):
            self.version += 1
        if name in ("publish", "republish"):
            self.publication = Publication("disk", 0.1, 10, ["a:1", "b:1"])
        result = (6, {"loader": 1}) if name == "load_recover" else None
        return result, [(0.5, 1, b"", b"")] if name == "policy_step" else [], (self.version, self.publication)


class Cluster:
    """Gives one gang of two ranks after the other; ``failures`` says how the second rank of each fails, and the first one waits."""

    failures: list[dict[str, object]]

    def __init__(self, config, logs):
        self.nodes, self.gangs, self.removed = [Node("10.0.0.1", 8.0, 0)], [], []

    def fit(self, demands, least_nodes, *, is_waited_for):
        return []

    def gang(self, role, path, count, **needs):
        fails = self.failures[len(self.gangs)] if len(self.gangs) < len(self.failures) else {}
        self.gangs.append([Rank(0, dict.fromkeys(fails, "nothing") if "start" not in fails else {}), Rank(1, fails)])
        return self.gangs[-1]

    def remove(self, processes):
        self.removed.append(processes)

    def close(self):
        pass


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_ranks, "RayCluster", Cluster)
    monkeypatch.setattr(ray_ranks, "_CAUSE_SECONDS", 0.1)

    def build(*failures, **recover):
        Cluster.failures = list(failures)
        config = GRPOConfig(cluster=ClusterConfig(kind="ray", processes=2), rollout=RolloutConfig(backend="builtin_process"))
        config.recover.mode = recover.get("mode", "auto")
        return PlacedRanks(config, FinetuneSpec(1, 10, 5, 10), RunDirectory(tmp_path, "experiment", "trial"), "actor")

    return build


ROLLOUT = SimpleNamespace(config=None, watch=SimpleNamespace(addresses=["a:1"]), client=None)
LOST = LostProcessError("rank 1 was lost")


def test_a_rank_that_is_lost_while_it_starts_or_connects_is_placed_again(make):
    ranks = make({"start": LOST}, {"connect": LOST})
    ranks.connect(ROLLOUT)
    first, second, third = ranks.cluster.gangs
    assert not first[0].asked
    assert second[0].asked == ["meeting_place", "open", "connect"]
    assert third[0].asked == ["meeting_place", "open", "connect"]
    assert ranks.cluster.removed == [first, second]


def test_a_rank_that_is_lost_at_the_first_load_is_placed_again_and_loads(make):
    ranks = make({"load_recover": LOST})
    ranks.connect(ROLLOUT)
    (ranks.recover.directory / "step_00000006").mkdir(parents=True)
    assert ranks.call("load_recover", part="actor") == (6, {"loader": 1})
    assert ranks.cluster.gangs[1][0].asked == ["meeting_place", "open", "connect", "load_recover"]


def test_a_rank_that_is_lost_before_the_first_checkpoint_makes_all_steps_again(make):
    ranks = make({"skip_publication": LOST})
    ranks.connect(ROLLOUT)
    ranks.call("publish")
    ranks.call("skip_publication")
    again = ranks.cluster.gangs[1][0].asked
    assert again == ["meeting_place", "open", "skip_publication", "connect", "republish", "skip_publication"]


def test_what_was_lost_is_told_where_the_others_only_lose_the_connection(make):
    broken = {name: LostRankError("another process has ended") for name in ("start",)}
    ranks = make(*[{"publish": RolloutError("RuntimeError: something odd")}])
    ranks.connect(ROLLOUT)
    with pytest.raises(RolloutError, match="something odd"):  # a fault of a rank is none that another gang mends
        ranks.call("publish")
    ranks = make(*[broken] * 4)
    with pytest.raises(LostRankError, match="the ranks were lost 4 times in start; the last time: another process has ended"):
        ranks.connect(ROLLOUT)


def test_without_checkpoints_a_gang_is_replaced_until_it_has_trained(make):
    ranks = make({"republish": LOST}, {"publish": LOST}, mode="off")
    ranks.connect(ROLLOUT)
    ranks.call("republish")
    ranks.call("skip_publication")
    with pytest.raises(LostRankError, match=r"recover\.mode off"):
        ranks.call("publish")


def packed():
    """Two rows of two groups, of which a rank has one each."""
    rows = [
        {
            "input_ids": torch.tensor([[number] * 3]),
            "loss_mask": torch.ones(1, 3, dtype=torch.int32),
            "versions": torch.zeros(1, 3, dtype=torch.int32),
            "rewards": torch.rand(1),
        }
        for number in (4, 5)
    ]
    batch = concat_padded_tensors([as_packed(row) for row in rows])
    return {**batch, "group_ids": torch.tensor([4, 5])}


def test_each_rank_gets_its_rows_with_the_call(make):
    ranks = make()
    ranks.connect(ROLLOUT)
    batch = packed()
    ranks.call("policy_step", batch)
    gang = ranks.cluster.gangs[0]
    assert sorted(rank.taken for rank in gang) == [[[[4, 4, 4]]], [[[5, 5, 5]]]]
    assert [rank.asked.count("policy_step") for rank in gang] == [1, 1]
    assert batch[TRAINED] == [(0.5, 1, b"", b"")] * 2
    assert not ranks.cluster.removed


def test_rows_of_a_dataset_are_packed_for_the_ranks(make):
    ranks = make()
    ranks.connect(ROLLOUT)
    batch = {
        "input_ids": torch.tensor([[1, 2], [3, 0]]),
        "attention_mask": torch.tensor([[True, True], [True, False]]),
        "loss_mask": torch.tensor([[0, 1], [1, 0]]),
    }
    ranks.call("supervised_step", batch)
    assert sorted(rank.taken for rank in ranks.cluster.gangs[0]) == [[[[1, 2]]], [[[3]]]]


def test_a_gang_that_is_placed_again_takes_the_rows_of_its_steps_again(make):
    ranks = make({"publish": LOST})
    ranks.connect(ROLLOUT)
    ranks.call("policy_step", packed())
    ranks.call("publish")
    again = ranks.cluster.gangs[1]
    assert sorted(rank.taken for rank in again) == [[[[4, 4, 4]]], [[[5, 5, 5]]]]
    assert again[0].asked[:3] == ["meeting_place", "open", "policy_step"]


def test_holders_of_weights_are_known_while_the_first_rank_is_not_there(make):
    ranks = make()
    ranks.connect(ROLLOUT)
    with pytest.raises(EngineError, match="no weights have been published yet"):
        ranks.holders()
    ranks.call("publish")
    assert ranks.holders() == (1, ["a:1"])  # as the first rank says by now
    ranks.cluster.gangs[0][0]._fails["holders"] = LOST
    assert ranks.holders() == (1, ["a:1", "b:1"])  # as the publication said
