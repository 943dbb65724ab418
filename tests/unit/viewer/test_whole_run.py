"""A run of several stages as a whole: its stages in order, before and after, config, software and log."""

from __future__ import annotations

import html
import re

import pytest
from starlette.testclient import TestClient
from test_index import write_sample

from rollwright.config.experiment import EvalConfig, GRPOConfig
from rollwright.config.loading import config_to_dict, save_config
from rollwright.config.sections import OptimizerConfig, PPOActorConfig
from rollwright.experience.journal.writing import Journal
from rollwright.tracking.run_directory import RunDirectory
from rollwright.tracking.sinks import JSONLSink
from rollwright.viewer.evaluations import Evaluation, interval_of_mean, of_shared_tasks, progress
from rollwright.viewer.runs import Runs
from rollwright.viewer.server import first_page, make_app, settings_of
from rollwright.viewer.whole_run import changed_keys

TASKS = [{"query_id": f"{number}+1"} for number in range(4)]
BEFORE, AFTER = [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]


def stage(kind, name, config):
    return {"kind": kind, "name": name, **config_to_dict(config)}


def evaluate(path, rewards, version=0):
    journal = Journal(path / "journal")
    for ordinal, (task, reward) in enumerate(zip(TASKS, rewards, strict=True)):
        write_sample(journal, ordinal, is_eval=True, version=version, reward=reward, task=task)
    journal.close()


@pytest.fixture
def whole(tmp_path):
    """The directory of a run: an evaluation, three steps of training, and an evaluation; nothing has begun of a last stage."""
    trained = GRPOConfig(actor=PPOActorConfig(optimizer=OptimizerConfig(lr=3e-4)), seed=7)
    stages = [{"kind": "model", "name": "model"}, stage("eval", "before", EvalConfig(seed=7)), stage("rl", "grpo", trained)]
    stages += [stage("eval", "after", EvalConfig(seed=7)), stage("eval", "later", EvalConfig(seed=7))]
    run = RunDirectory(tmp_path / "runs", "made", "run").claim({"stages": stages})
    before, grpo, after = (run.stage(name) for name in ("before", "grpo", "after"))
    for part, config in ((before, EvalConfig()), (grpo, trained), (after, EvalConfig())):
        save_config(config, part.path / "config.yaml")
    evaluate(before.path, BEFORE)
    evaluate(after.path, AFTER)
    sink = JSONLSink(grpo.metrics_file)
    for step in (1, 2, 3):
        sink.write(step, {"reward": step / 10})
    sink.close()
    (grpo.path / "logs" / "run.log").write_text("one\ntwo <b>\n")
    done = {
        name: {"kind": kind, "total_seconds": 2.0} for name, kind in (("before", "eval"), ("grpo", "rl"), ("after", "eval"))
    }
    run.write_stages({"model": {"kind": "model", "parameters": 1234}, **done})
    run.release()
    return run.path


def test_the_stages_are_in_order_with_their_states(whole):
    runs = Runs(whole.parents[1])
    found = runs.whole("made/run")
    assert found is not None
    parts = [(part.name, part.kind, part.state, part.run is not None) for part in found.parts()]
    assert parts == [
        ("model", "model", "finished", False),
        ("before", "eval", "finished", True),
        ("grpo", "rl", "finished", True),
        ("after", "eval", "finished", True),
        ("later", "eval", "stopped", False),
    ]
    assert runs.whole("made/run/grpo") is None
    assert [name for name in runs.wholes()] == ["made/run"]
    runs.close()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_view_opens_the_page_of_the_whole_run(whole, depth):
    place = [whole, *whole.parents][depth]
    app, settings = make_app([place]), settings_of("127.0.0.1", 0)
    pages = app.state.pages
    for entry in pages.entries():
        pages.runs.get(entry["id"]).refresh()
    client = TestClient(app, base_url="http://localhost")
    address = first_page(app, settings)
    assert address == ("/run/run", "/run/run", "/run/made~run")[depth]
    page = html.unescape(client.get(address).text)
    linked = re.findall(r'<a data-open href="([^"]+)"><b>(\w+)</b>', page)
    assert [name for _, name in linked] == ["before", "grpo", "after"]
    assert all(client.get(url).status_code == 200 for url, _ in linked)
    assert f'<a href="{address}">' in client.get(linked[1][0]).text  # the stage leads back
    row = re.sub(r"<[^>]+>|\s+", " ", page.partition("before → after</a></td>")[2].partition("</tr>")[0]).split()
    assert row[:2] == ["4", "0.25"]
    assert "0.75" in row
    assert "+0.5" in row
    assert row[-3:] == ["2", "/", "0"]
    assert "actor.optimizer.lr" in page
    assert "two &lt;b&gt;" in client.get(address).text
    assert "two &lt;b&gt;" in client.get(f"{address}/log").text
    assert re.search(r"<dt>rollwright</dt><dd><code>\d", page)
    assert "stopped" in page
    pages.runs.close()


def test_what_differs_from_the_defaults():
    config = GRPOConfig(actor=PPOActorConfig(optimizer=OptimizerConfig(lr=3e-4)), seed=7)
    found = {row["key"]: row for row in changed_keys([stage("rl", "grpo", config), stage("eval", "after", EvalConfig(seed=7))])}
    assert found["seed"]["stages"] == ["grpo", "after"]
    assert (found["actor.optimizer.lr"]["value"], found["actor.optimizer.lr"]["stages"]) == (3e-4, ["grpo"])
    assert "actor.optimizer.weight_decay" not in found
    assert changed_keys([stage("rl", "grpo", GRPOConfig())]) == []


def test_evaluations_of_other_tasks_are_apart():
    first, other, last = (
        Evaluation("before", 0, rewards={"a": 0.0, "b": 1.0}),
        Evaluation("grpo", 1, rewards={"x": 1.0}),
        Evaluation("after", 2, rewards={"b": 0.5, "c": 1.0}),
    )
    assert of_shared_tasks([first, other, last]) == [[other], [first, last]]
    (found,) = progress([first, last])
    assert (found["common"], found["difference"], found["better"], found["worse"]) == (1, -0.5, 0, 1)
    (alone,) = progress([other])
    assert (alone["last"], alone["difference"]) == (None, None)


def test_each_later_stage_is_compared_with_the_first():
    def evaluated(stage, version, reward):
        return Evaluation(stage, version, is_one=stage != "grpo", rewards={"a": reward})

    evaluations = [
        evaluated("before", 0, 0.0),
        evaluated("grpo", 1, 0.25),
        evaluated("grpo", 2, 0.5),
        evaluated("after", 2, 1.0),
    ]
    found = [(row["first"]["title"], row["last"]["title"], row["difference"]) for row in progress(evaluations)]
    assert found == [("before", "grpo v2", 0.5), ("before", "after", 1.0)]
    assert [row["last"]["title"] for row in progress(evaluations[1:])] == ["grpo v2", "after"]


def test_the_interval_of_a_share_is_within_0_and_1():
    assert interval_of_mean([1.0] * 50) == "0.9287 to 1"  # 50 / (50 + 1.959964²)
    assert interval_of_mean([0.0] * 740) == "0 to 0.005164"
    assert interval_of_mean([0.5, 1.0, 0.0, 0.5]) == "−0.1496 to 1.15"  # 0.5 ± 3.1824 · √(1/6) / 2
    assert interval_of_mean([1.0]) == ""
