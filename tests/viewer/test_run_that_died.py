"""The quickstart with a reward function that breaks: why it died, and the evaluation stage that came before."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from viewed_runs import serve

import rollwright
from rollwright.experience.journal.reading import journal_files
from rollwright.viewer.run import Run
from rollwright.viewer.server import make_app

BREAKS = """
from rollwright import REWARD_FUNCTIONS

calls = 0


@REWARD_FUNCTIONS.register_module("breaks")
def breaks(prompt, completion, prompt_ids, completion_ids, answer, **_):
    global calls
    calls += 1
    if calls > 30:
        raise KeyError(f"no score for {answer!r}")
    return float(calls % 2)
"""
SMALL = {
    "stages.model": {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate_size": 64},
    "stages.warmup": {"total_train_steps": 2, "train_dataset.batch_size": 8, "evaluator.limit": 4},
    "stages.before": {"dataset.limit": 6, "samples": 2},
    "stages.grpo": {"train_dataset.batch_size": 4, "evaluator.limit": 4, "evaluator.every_steps": 1, "reward_fn": "breaks"},
    "gconfig": {"n_samples": 4, "max_new_tokens": 6},
}


@pytest.fixture(scope="module")
def died(warm, tmp_path_factory) -> Path:
    """The directory of that run."""
    place = tmp_path_factory.mktemp("died")
    (place / "breaks.py").write_text(BREAKS)
    small = [f"{section}.{key}={value}" for section, keys in SMALL.items() for key, value in keys.items()]
    done = warm.run(["rollwright", "run", "quickstart", "plugins=[breaks.py]", *small], place)
    assert done.returncode == 1, done.stderr[-2000:]
    return place / "runs" / "quickstart" / "trial"


@pytest.fixture
def pages(died) -> Any:
    app = make_app([died.parents[1]])
    for entry in app.state.pages.entries():
        app.state.pages.runs.get(entry["id"]).refresh()
    with TestClient(app, base_url="http://localhost") as client:
        yield client


def test_the_page_says_why_the_run_died(pages, died):
    page = html.unescape(pages.get("/run/quickstart~trial~grpo").text)
    assert "It stopped with an error" in page
    cause, _, rest = page.partition('<p class="cause" tabindex="0">')[2].partition("</p>")
    assert cause.startswith("rollwright.errors.RolloutError: ")
    assert 'KeyError: "no score for' in cause
    assert "in breaks" in rest.partition("<pre")[2].partition("</pre>")[0]  # the traceback of the reward function
    assert (died / "grpo" / "logs" / "run.log").read_text().strip().splitlines()[-1][:80] in page
    assert "This page follows the run" not in page


def test_one_click_from_the_list_of_runs_says_why_it_died(watched, died):
    served = serve([died.parents[1]])
    try:
        tab = watched(1280, "light", served.url)
        tab.visit("/")
        tab.follow(tab.page.get_by_role("link", name="quickstart/trial", exact=True).first, "/run/quickstart~trial$")
        assert 'KeyError: "no score for' in tab.page.locator(".ending .cause").inner_text()
        states = tab.page.get_by_role("region", name="Stages").locator("tbody tr .state").all_inner_texts()
        assert states == ["finished", "finished", "finished", "stopped", "waiting"]
        assert (
            tab.page.get_by_role("region", name="Before and after").locator("tbody tr").first.inner_text().startswith("before")
        )
    finally:
        served.stop()


def test_it_leads_to_the_samples_that_failed(pages, died):
    with Run(died / "grpo") as run:
        run.refresh()
        ending = run.ending()
    assert ending is not None
    assert ending["failed"]
    page = pages.get("/run/quickstart~trial~grpo").text
    for sample in ending["failed"]:
        address = f"/run/quickstart~trial~grpo/sample/{sample['key'].replace('#', '%23')}"
        assert f'href="{address}"' in page
        assert "no score for" in html.unescape(pages.get(address).text)


def test_a_stage_that_fails_at_once_is_listed_with_its_cause(warm, tmp_path):
    (tmp_path / "wrong.py").write_text(BREAKS.replace("prompt, completion, prompt_ids, completion_ids, ", ""))
    model = [f"{section}.{key}={value}" for section, keys in SMALL.items() for key, value in keys.items()]
    done = warm.run(["rollwright", "run", "quickstart", "plugins=[wrong.py]", *model], tmp_path)
    assert done.returncode == 1
    client = TestClient(make_app([tmp_path / "runs"]), base_url="http://localhost")
    assert "quickstart/trial/grpo" in client.get("/").text
    page = html.unescape(client.get("/run/quickstart~trial~grpo").text)
    assert "rollwright.errors.RewardError: reward function" in page
    assert "Missing" not in page  # it has written nothing yet, which is no damage


def test_an_evaluation_stage_keeps_a_journal_and_is_listed(pages, died):
    assert journal_files(died / "before" / "journal")
    assert "quickstart/trial/before" in pages.get("/").text
    with Run(died / "before") as run:
        run.refresh()
        assert (run.kind, run.state, run.missing(), run.diagnosis()) == ("eval", "finished", [], [])
        samples = run.frame("samples", eval=1)
        assert len(samples) == run.frame("samples").shape[0] == 6 * (1 + 2)  # greedy, and two samples of each task
        scores = run.scores()
        assert list(scores) == ["greedy", "mean@2"]
        held_out = run.held_out()
        assert held_out["mean"] == pytest.approx(scores["mean@2"])
        page = html.unescape(pages.get("/run/quickstart~trial~before").text)
        for task in held_out["tasks"]:
            assert f">{task['task']}</a>" in page
            assert pages.get(f"/run/quickstart~trial~before/group/{task['group']}").status_code == 200
    assert "mean@2" in page
    assert "/steps" not in page


def test_a_run_of_several_stages_is_the_stage_that_trained(died):
    assert rollwright.Run(died).path == died / "grpo"
