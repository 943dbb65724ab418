"""The words and numbers of the pages of a recorded run, and links into a run whose journal is still being read."""

from __future__ import annotations

import html
import json
import math
import re

import pytest
from starlette.testclient import TestClient

from rollwright.tracking.readable import advantage, number, without_noise
from rollwright.viewer import sample_view
from rollwright.viewer.pictures import prefix_tree, signed_shade
from rollwright.viewer.report import write_report
from rollwright.viewer.run import Run
from rollwright.viewer.server import make_app


@pytest.fixture
def served(copied_run):
    app = make_app([copied_run])
    run = app.state.pages.runs.get("run")
    run.refresh()
    yield TestClient(app, base_url="http://localhost"), run
    app.state.pages.runs.close()


def test_a_link_shows_progress_until_the_index_has_its_page(copied_run):
    app = make_app([copied_run])
    run = app.state.pages.runs.get("run")
    run.follow = lambda: None  # the index is built when this test says so
    client = TestClient(app, base_url="http://localhost")
    for address in ("/run/run/sample/1/2", "/run/run/group/1", "/run/run/step/2"):
        early = client.get(address)
        assert early.status_code in (200, 202)
        assert "of the journal is read" in early.text or "Reading the journal" in early.text
        assert 'data-stamp="' in early.text  # so that the page is replaced
    stamp = client.get("/run/run/stamp").text
    run.refresh()
    assert client.get("/run/run/stamp").text != stamp
    for address in ("/run/run/sample/1/2", "/run/run/group/1", "/run/run/step/2"):
        answer = client.get(address)
        assert answer.status_code == 200
        assert "Reading the journal" not in answer.text
    assert client.get("/run/run/sample/99/9").status_code == 404
    app.state.pages.runs.close()


def test_the_line_about_a_token_has_the_numbers_of_the_legend(served):
    _, run = served
    row = run.sample("1/0")["rows"][0]
    shown = dict(sample_view.tokens(row, "advantage")["facts"])
    for name, values in (("advantage", row["advantages"]), ("engine log-prob", row["logprobs"])):
        assert shown[name] == [
            None if value is None else number(without_noise(value) if name == "advantage" else value) for value in values
        ]
    small = {**row, "trainer_logprobs": [None if value is None else value - 2e-6 for value in row["logprobs"]]}
    difference = next(
        value for value in dict(sample_view.tokens(small, "difference")["facts"])["difference"] if value is not None
    )
    assert difference.endswith("e-06")


def test_advantages_that_are_rounding_errors_are_zero(served):
    _, run = served
    row = run.sample("1/0")["rows"][0]
    nothing = {**row, "advantages": [1e-9 if trained else None for trained in row["mask"]]}
    tokens = sample_view.tokens(nothing, "advantage")
    assert not any(re.search(r" (p|n)\d| plus| minus", token["shade"]) for token in tokens["tokens"])
    assert {token["value"] for token in tokens["tokens"]} <= {"", "0"}
    assert (advantage(-3e-8), advantage(0.5), without_noise(1e-3)) == ("0", "+0.5", 1e-3)
    assert signed_shade(without_noise(4e-7, 0.5), 0.5) == "z"


def test_labels_of_the_tree_fit_their_boxes(served):
    _, run = served
    for step in run.steps():
        for group in run.step(step["step"])["groups"]:
            drawn = prefix_tree(run.group(group["key"])["tree"], {})
            for node in drawn["nodes"]:
                assert 6.6 * len(node["caption"]) <= node["width"]
                assert node["x"] + node["width"] + 6 + 6 * len(node["end"]) <= drawn["width"]


def test_a_token_of_spaces_is_seen(served):
    _, run = served
    row = run.sample("1/0")["rows"][0]
    row["texts"][0], row["texts"][1] = "  ", " a"
    assert [token["text"] for token in sample_view.tokens(row, "trained")["tokens"][:2]] == ["␣␣", " a"]


def test_the_steps_have_their_seconds_tokens_and_evaluation(served):
    client, run = served
    page = html.unescape(client.get("/run/run/steps").text)
    for step in run.steps():
        assert step["eval"] == dict(run.curves.points("eval/reward"))[step["step"]]
        seconds = [
            dict(run.curves.points(name)).get(step["step"], 0.0) for name in run.curves.names() if name.startswith("seconds/")
        ]
        assert step["seconds"] == pytest.approx(math.fsum(seconds))
        assert f">{number(step['seconds'])}<" in page
        assert step["tokens"] > 0


def test_cut_is_said_of_samples_whose_group_ended(served):
    client, _ = served
    page = client.get("/run/run/search").text
    assert "Truncated by a limit" in page
    assert '<option value="cut">cut</option>' in page  # the status of a sample whose group ended
    assert "cut by" not in page.lower()


def test_a_report_names_its_run_and_has_the_held_out_tasks(copied_run, tmp_path):
    text = html.unescape(write_report([copied_run], tmp_path / "report.html", 4).read_text())
    with Run(copied_run) as run:
        assert f"<h1>{run.name}</h1>" in text
        run.refresh()
        for task in run.held_out()["tasks"]:
            assert f"<td>{task['task']}</td>" in text
    assert "Held-out tasks" in text


def test_a_stage_of_supervised_training_is_listed_by_its_loss(tmp_path):
    stage = tmp_path / "made" / "run" / "warmup"
    stage.mkdir(parents=True)
    (stage / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "loss": 2.0 / step}) + "\n" for step in (1, 2, 4)))
    page = TestClient(make_app([tmp_path]), base_url="http://localhost").get("/").text
    assert '<span class="muted">Loss</span> 0.5' in page
    assert 'aria-label="loss over steps"' in page
