"""The ranks of a training on a Ray cluster: what they are asked, and what a lost rank ends."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from rollwright.config.experiment import FinetuneSpec, GRPOConfig
from rollwright.config.sections import ClusterConfig, RolloutConfig
from rollwright.errors import EngineError, LostProcessError, LostRankError, RolloutError
from rollwright.experience.packed import as_packed, rows_of
from rollwright.experience.trajectory import concat_padded_tensors
from rollwright.placement import ray_ranks
from rollwright.placement.capacity import Node
from rollwright.placement.ranks import TRAINED
from rollwright.placement.ray_ranks import RayRanks
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
        return result, [(0.5, 1, b"", b"", b"", b"")] if name == "policy_step" else [], (self.version, self.publication)


class Cluster:
    """Gives gangs of two ranks; ``fails`` says how the second rank fails. Then the first one fails with ``waits``, or waits forever."""

    fails: dict[str, object]
    waits: object

    def __init__(self, config, logs):
        self.nodes, self.gangs = [Node("10.0.0.1", 8.0, 0)], []

    def fit(self, demands, least_nodes, *, is_waited_for):
        return []

    def gang(self, role, path, count, **needs):
        self.gangs.append([Rank(0, {name: self.waits for name in self.fails if name != "start"}), Rank(1, self.fails)])
        return self.gangs[-1]

    def close(self):
        pass


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_ranks, "RayCluster", Cluster)
    monkeypatch.setattr(ray_ranks, "_CAUSE_SECONDS", 0.1)

    def build(fails=None, waits="nothing"):
        Cluster.fails, Cluster.waits = fails or {}, waits
        config = GRPOConfig(cluster=ClusterConfig(kind="ray", processes=2), rollout=RolloutConfig(backend="builtin_process"))
        return RayRanks(config, FinetuneSpec(1, 10, 5, 10), RunDirectory(tmp_path, "experiment", "trial"))

    return build


ROLLOUT = SimpleNamespace(config=None, watch=SimpleNamespace(addresses=["a:1"]), client=None)
LOST = LostProcessError("rank 1 was lost")


@pytest.mark.parametrize("call", ["load_recover", "publish", "save_recover"])
def test_a_lost_rank_ends_the_call_and_no_rank_is_placed_again(make, call):
    ranks = make({call: LOST})
    ranks.connect(ROLLOUT)
    with pytest.raises(LostRankError, match="rank 1 was lost"):
        ranks.call(call)
    (gang,) = ranks.cluster.gangs
    assert gang[1].asked[-1] == call


@pytest.mark.parametrize("moment", ["start", "open", "connect"])
def test_a_rank_that_is_lost_while_it_starts_or_connects_ends_the_first_call(make, moment):
    ranks = make({moment: LOST})
    with pytest.raises(LostRankError, match="rank 1 was lost"):
        ranks.connect(ROLLOUT)
    assert len(ranks.cluster.gangs) == 1


def test_the_lost_rank_is_named_and_not_those_that_lost_the_connection(make):
    ranks = make({"publish": LOST}, waits=LostRankError("another process has ended"))
    ranks.connect(ROLLOUT)
    with pytest.raises(LostRankError, match="rank 1 was lost"):
        ranks.call("publish")


def test_a_fault_of_a_rank_is_no_loss(make):
    ranks = make({"publish": RolloutError("RuntimeError: something odd")})
    ranks.connect(ROLLOUT)
    with pytest.raises(RolloutError, match="something odd"):  # another gang would fail in the same way
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
    assert batch[TRAINED] == [(0.5, 1, b"", b"", b"", b"")] * 2


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


def test_holders_of_weights_are_known_while_the_first_rank_is_not_there(make):
    ranks = make()
    ranks.connect(ROLLOUT)
    with pytest.raises(EngineError, match="no weights have been published yet"):
        ranks.holders()
    ranks.call("publish")
    assert ranks.holders() == (1, ["a:1"])  # as the first rank says by now
    ranks.cluster.gangs[0][0]._fails["holders"] = LOST
    assert ranks.holders() == (1, ["a:1", "b:1"])  # as the publication said
