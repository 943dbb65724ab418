"""Charts: what several runs share, the mean of seeds with its band, and the positions of steps along time, tokens and samples."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rollwright.tracking.sinks import JSONLSink
from rollwright.tracking.sweeps import SweepRun, write_sweep
from rollwright.viewer.charts import by_setting, chart_rows, charts_of, positions
from rollwright.viewer.run import Run
from rollwright.viewer.server import make_app


def made(path: Path, rewards: dict[int, float], lr: float = 1e-3, seed: int = 1) -> Run:
    """A run whose steps have these rewards, 8 samples of 10 tokens on average."""
    path.mkdir(parents=True)
    model = path / "checkpoints" / "final"
    (path / "config.yaml").write_text(f"seed: {seed}\ntrial_name: {path.name}\nactor: {{lr: {lr}, path: {model}}}\n")
    (path / "run.json").write_text(json.dumps({"experiment": path.parent.name, "trial": path.name}))
    sink = JSONLSink(path / "metrics.jsonl")
    for step, reward in rewards.items():
        sink.write(step, {"reward": reward, "samples": 8, "response_tokens": 10.0, "actor/lr": lr})
    sink.close()
    return Run(path)


@pytest.fixture
def seeds(tmp_path):
    """Two seeds of one setting, the second of which is longer, and one run of another setting."""
    first = made(tmp_path / "sums" / "a-1", {1: 0.0, 2: 0.25, 3: 0.5, 4: 0.5}, seed=1)
    second = made(tmp_path / "sums" / "a-2", {1: 0.5, 2: 0.25, 3: 1.0, 4: 0.75, 5: 1.0}, seed=2)
    other = made(tmp_path / "sums" / "b-1", {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}, lr=3e-4)
    return [("a-1", first), ("a-2", second), ("b-1", other)]


def chart(shown, name):
    return next(chart for _, charts in shown["groups"] for chart in charts if chart["name"] == name)


def test_seeds_of_one_setting_are_one_line_with_a_band(seeds):
    lines = by_setting(seeds)
    assert [(label, len(runs)) for label, runs in lines] == [("lr=0.001", 2), ("lr=0.0003", 1)]
    mean, single = chart(charts_of(lines), "reward")["series"]
    assert mean["points"] == [[1, 0.25], [2, 0.25], [3, 0.75], [4, 0.625], [5, 1.0]]  # the fifth of the run that got there
    assert [low for _, low in mean["low"]] == [0.0, 0.25, 0.5, 0.5, 1.0]
    assert [high for _, high in mean["high"]] == [0.5, 0.25, 1.0, 0.75, 1.0]
    assert "low" not in single


def test_a_step_that_one_seed_lacks_in_between_is_no_mean(tmp_path):
    runs = [made(tmp_path / "x" / "1", {1: 0.0, 3: 1.0}), made(tmp_path / "x" / "2", {1: 1.0, 2: 1.0, 3: 1.0})]
    (series,) = chart(charts_of([("both", runs)]), "reward")["series"]
    assert series["points"] == [[1, 0.5], [3, 1.0]]


def test_what_never_changes_is_told_in_words_for_several_runs_too(seeds):
    shown = charts_of([(label, [run]) for label, run in seeds])
    steady = dict(shown["steady"])
    assert steady["samples"].strip() == "8"
    assert steady["actor/lr"].strip() == "0.001 · 0.001 · 3.0e-04"
    assert {chart["name"] for _, charts in shown["groups"] for chart in charts} == {"reward"}
    kept = charts_of([(label, [run]) for label, run in seeds], always=["samples"])
    assert chart(kept, "samples")


def test_steps_have_positions_along_time_tokens_and_samples(seeds):
    (_, run), *_ = seeds
    along = positions(run)
    assert along["samples"] == {1: 8, 2: 16, 3: 24, 4: 32}
    assert along["tokens"] == {1: 80, 2: 160, 3: 240, 4: 320}
    assert sorted(along["time"]) == [1, 2, 3, 4]
    assert charts_of([("", [run])])["axes"][0]["tokens"] == [[1, 80], [2, 160], [3, 240], [4, 320]]
    row = chart_rows([("one", [run])], "reward")[2]
    assert (row["line"], row["step"], row["tokens"], row["reward"]) == ("one", 3, 240, 0.5)


def test_a_supervised_stage_has_the_tokens_that_it_trained_on(tmp_path):
    path = tmp_path / "warmup"
    path.mkdir()
    sink = JSONLSink(path / "metrics.jsonl")
    for step in (1, 2):
        sink.write(step, {"loss": 1.0 / step, "tokens_per_second/train": 100.0, "seconds/train": 2.0})
    sink.close()
    assert positions(Run(path))["tokens"] == {1: 200.0, 2: 400.0}


def charts_in(page: str) -> dict[str, dict]:
    found = re.findall(r'data-chart="(.*?)" data-name="(.*?)"', page)
    return {unescape(name): json.loads(unescape(chart)) for chart, name in found}


def test_the_pages_of_a_sweep_and_of_a_comparison_draw_means(seeds, tmp_path):
    members = [SweepRun(name, "lr=0.001" if name[0] == "a" else "lr=0.0003", name[-1]) for name, _ in seeds]
    write_sweep(tmp_path / "sums" / "t.sweep.json", members)
    with TestClient(make_app([tmp_path]), base_url="http://127.0.0.1:7111") as client:
        for address in ("/sweep/sums~t", "/compare?run=sums/a-1&run=sums/a-2&run=sums/b-1&by=setting"):
            page = client.get(address).text
            assert [each["label"] for each in charts_in(page)["reward"]["series"]] == ["lr=0.001", "lr=0.0003"]
            assert "mean of 2, band lowest to highest" in page
            name = "&" if "?" in address else "?"
            lines = client.get(f"{address}{name}format=csv&metric=reward").text.splitlines()
            assert (
                lines[0] == "line,run,step,time,samples,tokens,reward" or lines[0] == "line,run,step,time,tokens,samples,reward"
            )
            assert len(lines) == 1 + 4 + 5 + 4
        page = client.get("/compare?run=sums/a-1&run=sums/a-2&run=sums/b-1").text
        assert len(charts_in(page)["reward"]["series"]) == 3
        assert "Mean of seeds" in page
        one = client.get("/run/sums~a-1?format=csv&metric=reward").text.splitlines()
        assert len(one) == 5
        many = "&".join(f"run=sums/{name}" for name in ["a-1", "a-2", "b-1"] * 3)
        page = client.get(f"/compare?{many}&by=run").text
        assert "3 more than can be drawn" in page
