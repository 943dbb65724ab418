"""Means and intervals over seeds against the distribution itself, and what of a run's summary is compared."""

import math
import statistics

import pytest
from rich.console import Console

from rollwright.tracking.intervals import quantile_of_t
from rollwright.tracking.sweeps import (
    SweepRun,
    measures_of_summary,
    read_sweep,
    spread,
    spreads,
    sweep_table,
    write_sweep,
)


def share_within(limit, degrees, steps=200_000):
    """The probability that Student's t is between -limit and limit: Simpson's rule over its density."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    width = limit / steps
    values = [scale * (1 + (index * width) ** 2 / degrees) ** (-(degrees + 1) / 2) for index in range(steps + 1)]
    return 2 * width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))


@pytest.mark.parametrize("degrees", [*range(1, 31, 4), 2, 3, 30, 31, 40, 100, 1000])
def test_the_quantile_holds_95_percent(degrees):
    assert share_within(quantile_of_t(degrees), degrees, steps=20_000) == pytest.approx(0.95, abs=1e-5)


def test_the_interval_of_three_seeds():
    found = spread("after greedy", "lr=1e-4", [0.9, 0.95, 0.94])
    assert found.mean == pytest.approx(0.93)
    assert found.half == pytest.approx(4.302653 * statistics.stdev([0.9, 0.95, 0.94]) / math.sqrt(3), rel=1e-4)
    assert spread("after greedy", "", [0.9]).half is None


SUMMARY = {
    "stages": {
        "model": {"kind": "model", "parameters": 1000},
        "warmup": {"kind": "sft", "steps": 4, "loss": 0.5, "eval": {}},
        "grpo": {"kind": "rl", "steps": 12, "reward": 0.75, "eval": {"2": 0.5, "12": 0.625, "8": 0.9}},
        "after": {"kind": "eval", "label": "trained", "greedy": 0.5, "mean@8": 0.25, "tasks": 256},
        "broken": {"kind": "eval", "label": "broken", "greedy": float("nan")},
    }
}


def test_a_summarys_accuracies_rewards_and_losses_are_compared():
    assert measures_of_summary(SUMMARY) == {
        "warmup loss": 0.5,
        "grpo held out": 0.625,
        "grpo reward": 0.75,
        "trained greedy": 0.5,
        "trained mean@8": 0.25,
    }
    assert measures_of_summary({"stages": {"rl": {"kind": "rl", "reward": 1.0}}}) == {"reward": 1.0}
    assert measures_of_summary({}) == {}


def runs():
    made = [SweepRun(f"t-{lr}-{seed}", f"lr={lr}", seed) for lr in ("1e-4", "3e-4") for seed in ("1", "2", "3")]
    for index, run in enumerate(made[:-1]):
        run.state, run.measures = "finished", {"after greedy": 0.9 + index / 100, "grpo held out": 0.5}
    made[-1].state = "failed"
    return made


def test_runs_without_results_are_left_out_of_means():
    rows = spreads(runs())
    assert [(row.measure, row.setting, len(row.values)) for row in rows] == [
        ("after greedy", "lr=1e-4", 3),
        ("after greedy", "lr=3e-4", 2),
        ("grpo held out", "lr=1e-4", 3),
        ("grpo held out", "lr=3e-4", 2),
    ]


def test_the_table_fits_a_terminal_of_80_columns():
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(sweep_table(runs()))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[1].split() == ["after", "greedy", "lr=1e-4", "0.910", "0.885", "…", "0.935", "0.900", "0.910", "0.920"]
    assert max(map(len, lines)) <= 80


def test_the_file_comes_back(tmp_path):
    path = tmp_path / "sums" / "t.sweep.json"
    write_sweep(path, runs())
    assert read_sweep(path) == runs()
    path.write_text('{"runs": [{"other": 1}]}')
    with pytest.raises(ValueError, match="not the file of a sweep"):
        read_sweep(path)
