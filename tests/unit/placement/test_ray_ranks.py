"""The ranks of a training on a cluster, where a process of them is lost: at the start, at the first load, and later."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rollwright.config.experiment import FinetuneSpec, GRPOConfig
from rollwright.config.sections import ClusterConfig, RolloutConfig
from rollwright.errors import CheckpointError, EngineError, LostProcessError, LostRankError, ReplayError, RolloutError
from rollwright.experience.contract import KEPT
from rollwright.experience.kept_rows import KeptRows
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
        if method == "take":
            references = arguments[0]
            self.taken.append(references)
            answer.set_result([number for number, reference in enumerate(references) if reference == "lost"])
            return answer
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


def outline():
    """Two rows of two groups, of which a rank has one each."""
    rows = {"input_ids": torch.empty(2, 0, dtype=torch.int64), "row_lengths": torch.tensor([3, 4]), "rewards": torch.rand(2)}
    rows["group_ids"] = torch.tensor([4, 5])
    return {**rows, KEPT: [(KeptRows(name, None, ""), 0) for name in ("kept", "lost")]}


def test_rows_that_were_lost_are_made_again_before_any_rank_begins(make):
    ranks = make()
    ranks.connect(ROLLOUT)
    ranks.restore = lambda lost: [setattr(kept, "reference", f"{kept.reference} and found") for kept in lost]
    batch = outline()
    ranks.call("policy_step", batch)
    gang = ranks.cluster.gangs[0]
    assert sorted(rank.taken for rank in gang) == [[["kept"], ["kept"]], [["lost"], ["lost and found"]]]
    assert [rank.asked.count("policy_step") for rank in gang] == [1, 1]
    assert batch[TRAINED] == [(0.5, 1, b"", b"")] * 2
    assert not ranks.cluster.removed


def test_rows_that_cannot_be_made_again_end_the_run_with_the_cause(make):
    def restore(error, lost):
        raise error("the rows of 1 episodes are lost with their node")

    ranks = make()
    ranks.connect(ROLLOUT)
    for error in (LostProcessError, RolloutError, ReplayError):
        ranks.restore = partial(restore, error)
        with pytest.raises(CheckpointError, match=r"lost with their node: start the run again, which goes on from the newest"):
            ranks.call("policy_step", outline())
    ranks.restore = lambda lost: None
    with pytest.raises(CheckpointError, match="lost again and again"):
        ranks.call("policy_step", outline())


def test_a_gang_that_is_placed_again_takes_the_rows_of_its_steps_again(make):
    ranks = make({"publish": LOST})
    ranks.connect(ROLLOUT)
    batch = outline()
    batch[KEPT][1][0].reference = "kept, too"
    ranks.call("policy_step", batch)
    ranks.call("publish")
    again = ranks.cluster.gangs[1]
    assert sorted(rank.taken for rank in again) == [[["kept"]], [["kept, too"]]]
    assert again[0].asked[:4] == ["meeting_place", "open", "take", "policy_step"]


def test_holders_of_weights_are_known_while_the_first_rank_is_not_there(make):
    ranks = make()
    ranks.connect(ROLLOUT)
    with pytest.raises(EngineError, match="no weights have been published yet"):
        ranks.holders()
    ranks.call("publish")
    assert ranks.holders() == (1, ["a:1"])  # as the first rank says by now
    ranks.cluster.gangs[0][0]._fails["holders"] = LOST
    assert ranks.holders() == (1, ["a:1", "b:1"])  # as the publication said
