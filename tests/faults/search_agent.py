"""The search agent of ``examples/search_agent.yaml``, on a world of six articles: killed at a fixed interval, it learns what it does undisturbed.

One warm-up serves all runs. Undisturbed runs of several seeds say how much scores and lengths of episodes differ between seeds; a run
that was killed again and again may not differ by more.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from warm import Warm

from .both import AHEAD, Both
from .parts import LIMIT, Part
from .plan import Fault
from .proof import Proof, compare

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORLD = {"size": 30, "worlds": 1, "world_size": 6, "two_hop_share": 0.0}
SCORES = ("reward", "eval/reward")  # of the last quarter of the steps, and of the last evaluation
#: Of the spread of undisturbed seeds, what a run may be away from their mean: standard deviations, and so much in any case.
DEVIATIONS, AT_LEAST = 3.0, 0.05
#: How much larger than between undisturbed seeds the distance of two distributions of lengths may be.
FARTHER = 1.5


class SearchAgent(Both):
    """GRPO of the example, from a model that was warmed up before, with sampling that runs ahead.

    Args:
        warmed_up: directory of that model.
        others: what undisturbed runs measured.
        interval: seconds from the first that a process writes to its kill.
    """

    steps = 12
    batch, samples = 10, 8
    slack = AHEAD
    seeds = 3  # of undisturbed runs

    def __init__(
        self,
        *arguments: Any,
        warmed_up: Path,
        others: Sequence[dict[str, Any]] = (),
        interval: float = 20.0,
    ) -> None:
        super().__init__(*arguments)
        self.warmed_up, self.others, self.interval = warmed_up, others, interval
        self.run_seed = int(self.root.name.rpartition("-")[2])

    @classmethod
    def prepare(cls, opened: contextlib.ExitStack, warm: Warm, root: Path, model: Path) -> dict[str, Any]:
        """Warm up, and make the undisturbed runs."""
        warmed_up = warm_up(warm, root / "warm-up")
        others = []
        for seed in range(1, cls.seeds + 1):
            run = cls(warm, root / f"undisturbed-{seed}", model, 0, warmed_up=warmed_up)
            proof = run.carry_out([])
            assert proof.holds, proof
            others += [{**proof.measured[0], "lengths": proof.lengths}]
        return {"warmed_up": warmed_up, "others": others}

    def write(self) -> None:
        """The example's stage ``grpo``, alone."""
        config = example()
        stage = next(stage for stage in config.pop("stages") if stage["name"] == "grpo")
        del stage["name"], stage["kind"]
        config |= stage | {"seed": self.run_seed, "total_train_steps": self.steps, "recover": {"every_steps": 2, "keep": 3}}
        config["actor"] |= {"path": str(self.warmed_up), "device": "cpu"}
        config["train_dataset"] |= {"batch_size": self.batch, "kwargs": WORLD}
        config["valid_dataset"] |= {"kwargs": WORLD}
        config["evaluator"] |= {"every_steps": self.steps}
        config["rollout"] = {"max_head_offpolicyness": AHEAD}
        write_yaml(self.root, config)

    def plan(self, generator: random.Random, kills: int) -> list[Fault]:
        """Kills at the interval, as many as the run takes."""
        return [Fault("kill", 0, 0.001, self.interval, 0.0)] * kills

    def prove(self) -> Proof:
        """Every sample trained once, with scores and lengths that are within the spread of undisturbed seeds."""
        history = self.history()
        proof = compare(history, steps=self.steps, batch=self.batch, samples=self.samples, slack=self.slack)
        proof.lengths = list(history.trained_lengths().values())
        records = [json.loads(line) for line in (self.trial / "metrics.jsonl").read_text().splitlines()]
        rewards = [record["reward"] for record in records if "actor/loss" in record]
        (score,) = [record["eval/reward"] for record in records if record["step"] == self.steps and "eval/reward" in record]
        measured: dict[str, Any] = {"seed": self.run_seed, "kills": self.counts["kill"]}
        measured |= {"reward": round(mean(rewards[-self.steps // 4 :]), 4), "eval/reward": round(score, 4)}
        for name, values in zip(("calls", "tokens"), zip(*proof.lengths, strict=True), strict=True):
            measured[name] = round(mean(values), 3)
        proof.measured = [measured]
        if self.others:
            compare_with_undisturbed(proof, self.others)
        return proof


def compare_with_undisturbed(proof: Proof, others: Sequence[dict[str, Any]]) -> None:
    """Note scores that are not within the spread of undisturbed seeds, and episodes of other lengths than theirs."""
    (measured,) = proof.measured
    measured["undisturbed"] = [{name: value for name, value in other.items() if name != "lengths"} for other in others]
    for name in SCORES:
        values = [other[name] for other in others]
        if abs(measured[name] - mean(values)) > max(AT_LEAST, DEVIATIONS * stdev(values)):
            proof.wrong.append(f"{name} is {measured[name]}, and {values} where nothing happened")
    for number, name in enumerate(("calls", "tokens")):
        lists = [[length[number] for length in other["lengths"]] for other in others]
        farthest = max(distance(each, _without(lists, index)) for index, each in enumerate(lists))
        far = distance([length[number] for length in proof.lengths], [value for each in lists for value in each])
        measured |= {f"distance of {name}": round(far, 4), f"distance of {name}, undisturbed": round(farthest, 4)}
        if far > FARTHER * farthest:
            proof.wrong.append(f"{name} of the episodes are {far:.3f} from the undisturbed ones, and these {farthest:.3f}")


def warm_up(warm: Warm, root: Path) -> Path:
    """The model that all runs begin with: the example's, after fewer and smaller steps."""
    root.mkdir()
    config = example()
    config["stages"] = [stage for stage in config["stages"] if stage["name"] in ("model", "warmup")]
    del config["gconfig"]
    stage = config["stages"][1]
    stage |= {"total_train_steps": 80, "stop_accuracy": 0.6}
    stage["train_dataset"] |= {"batch_size": 16, "kwargs": {**WORLD, "worked": True}}
    stage["valid_dataset"] |= {"kwargs": WORLD}
    write_yaml(root, config)
    part = Part(warm, "warm-up", ["run", "config.yaml"], root)
    part.start()
    assert part.wait(10 * LIMIT) == 0, part.said()
    return root / "runs/faults/trial/warmup/checkpoints/final"


def example() -> dict[str, Any]:
    """The example's config, in a small world."""
    config = yaml.safe_load((EXAMPLES / "search_agent.yaml").read_text())
    config["plugins"] = [str(EXAMPLES / "worlds/encyclopedia.py")]
    config["workflow_kwargs"] |= {"search_tool": {"encyclopedia": {"worlds": 1, "world_size": 6}}}
    return config


def write_yaml(root: Path, config: dict[str, Any]) -> None:
    """Write ``config.yaml`` of a run in ``root``."""
    config |= {"experiment_name": "faults", "trial_name": "trial", "cluster": {"fileroot": f"{root}/runs", "threads": 1}}
    config["stats_logger"] = {"display": "none", "dump_rollouts": -1}
    (root / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def distance(some: Sequence[int], others: Sequence[int]) -> float:
    """The largest difference of two distributions (Kolmogorov and Smirnov)."""
    some, others = sorted(some), sorted(others)
    return max(
        abs(bisect.bisect_right(some, value) / len(some) - bisect.bisect_right(others, value) / len(others))
        for value in {*some, *others}
    )


def _without(lists: Sequence[Sequence[int]], index: int) -> list[int]:
    return [value for number, each in enumerate(lists) if number != index for value in each]
