"""Dumps, plots and the summary."""

import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from rollwright.tracking import plots
from rollwright.tracking.plots import plot_curves, plot_reward_curve
from rollwright.tracking.rollout_dumps import RolloutDumper
from rollwright.tracking.summary import before_after_table, sample_completions, write_summary

torch = pytest.importorskip("torch")


class Letters:
    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + token) for token in token_ids)


def batch():
    return {
        "input_ids": torch.tensor([[0, 1, 2, 3, 4, 0], [5, 6, 7, 0, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]).bool(),
        "loss_mask": torch.tensor([[0, 0, 1, 0, 1, 0], [0, 1, 1, 0, 0, 0]]),
        "logprobs": torch.tensor([[0, 0, -1.0, 0, -3.0, 0], [0, -0.5, -0.5, 0, 0, 0]]),
        "versions": torch.tensor([[-1, -1, 4, -1, 5, -1], [-1, 5, 5, -1, -1, -1]]).int(),
        "rewards": torch.tensor([1.0, 0.0]),
        "group_ids": torch.tensor([7, 8]),
        "truncated": torch.tensor([False, True]),
        "pixel_values": torch.zeros(2, 3, 4),
    }


def test_a_dump_can_be_read_by_people_and_machines(tmp_path):
    path = RolloutDumper(tmp_path, Letters(), limit=-1).dump(12, batch())
    assert path.name == "step-000012.txt"
    text = path.read_text()
    assert "── prompt\nab\n── completion\nc⟦d⟧e\n" in text
    assert "group 7 · reward 1 · 2 prompt + 2 sampled tokens of 5 · versions 4–5 · ended by stop · mean logprob -2.000" in text
    first, second = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert first["input_ids"] == [0, 1, 2, 3, 4]
    assert first["loss_mask"] == [0, 0, 1, 0, 1]
    assert first["logprobs"] == [0, 0, -1, 0, -3]
    assert first["versions"] == [-1, -1, 4, -1, 5]
    assert (first["row"], first["step"], first["group_ids"]) == (0, 12, 7)
    assert second["stop_reason"] == "length"


def test_only_so_many_rows_and_none_at_zero(tmp_path):
    assert RolloutDumper(tmp_path, Letters(), limit=0).dump(1, batch()) is None
    path = RolloutDumper(tmp_path, Letters(), limit=1).dump(1, batch())
    assert len(path.with_suffix(".jsonl").read_text().splitlines()) == 1
    RolloutDumper(tmp_path, Letters(), limit=1, for_programs=False).dump(2, batch())
    assert [each.name for each in sorted(tmp_path.glob("step-000002.*"))] == ["step-000002.txt"]


def test_without_matplotlib_nothing_is_drawn_and_it_is_said(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(plots, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    monkeypatch.setattr(plots.logger, "warning", lambda text, *arguments: said.append(text % arguments))
    assert plot_reward_curve(tmp_path / "reward.png", [(1, 0.2)]) is None
    assert plot_curves(tmp_path / "c.png", {"a": [(1, 2.0)]}, title="one") is None
    assert ["rollwright[plots]" in text for text in said] == [True, True]
    assert not list(tmp_path.iterdir())


def test_plots_are_pictures(tmp_path):
    path = plot_reward_curve(tmp_path / "plots" / "reward.png", [(1, 0.2), (2, 0.4)], [(0, 0.1), (2, 0.5)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    assert plot_reward_curve(tmp_path / "empty.png", []).exists()
    assert plot_curves(tmp_path / "c.svg", {"a": [(1, 2.0), (2, -1.0)]}, title="two").read_text().startswith("<?xml")


def test_the_summary_is_plain_json(tmp_path):
    summary = {
        "eval": {"before": {"accuracy": torch.tensor(0.25)}},
        "seconds": {"train": 1.5},
        "path": tmp_path,
        "bad": float("nan"),
    }
    write_summary(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "eval": {"before": {"accuracy": 0.25}},
        "seconds": {"train": 1.5},
        "path": str(tmp_path),
        "bad": None,
    }


def test_the_table_and_the_samples_print_what_they_are_given():
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(before_after_table({"greedy": 0.31, "gone": 0.5}, {"greedy": 0.94}, "accuracy"))
    console.print(sample_completions([{"prompt": "1+1=", "completion": "[red]2", "reward": 1.0, "answer": 2}]))
    console.file.close()
    text = console.export_text()
    assert "greedy" in text
    assert "+0.630" in text
    assert "[red]2" in text
