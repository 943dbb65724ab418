"""Runs are compared on the tasks that they share, whatever the order in which they evaluated them."""

from __future__ import annotations

import statistics

import pytest
from recorded import TASKS, record_run
from starlette.testclient import TestClient
from test_index import write_sample

from rollwright.experience.journal.writing import Journal
from rollwright.viewer.collector import identity_of_task
from rollwright.viewer.evaluations import compare
from rollwright.viewer.run import Run
from rollwright.viewer.server import make_app


def evaluated(run: Run) -> dict[str, float]:
    """Mean reward of each task in the last evaluation, from the samples themselves."""
    newest = max(sample["version"][0] for sample in run.search(is_eval=True, limit=-1)["samples"])
    found: dict[str, list[float]] = {}
    for sample in run.search(is_eval=True, status="accepted", limit=-1)["samples"]:
        if sample["version"][0] == newest:
            found.setdefault(run.sample(sample["key"])["task"]["question"], []).append(sample["reward"])
    return {task: statistics.fmean(rewards) for task, rewards in found.items()}


@pytest.fixture(scope="module")
def runs(recorded_run, tiny_model, tmp_path_factory):
    """Recorded runs: one whose second task is the first of the other, and one that shares no task with it."""
    root = tmp_path_factory.mktemp("others")
    record_run(root / "shifted", tiny_model, TASKS[1:5], steps=1)
    record_run(root / "strange", tiny_model, TASKS[5:8], steps=1)
    return [recorded_run, root / "shifted" / "runs" / "viewed" / "run", root / "strange" / "runs" / "viewed" / "run"]


def test_runs_are_compared_on_the_tasks_in_both(runs):
    first, shifted, strange = (Run(path) for path in runs)
    for run in (first, shifted, strange):
        run.refresh()
    both = TASKS[1]["question"]
    assert evaluated(first).keys() & evaluated(shifted).keys() == {both}
    assert sorted(first.last_evaluation().values()) == sorted(evaluated(first).values())
    rows = compare([("a", first.last_evaluation()), ("b", shifted.last_evaluation()), ("c", strange.last_evaluation())])["rows"]
    assert [(row["tasks"], row["common"]) for row in rows] == [(2, None), (4, 1), (3, 0)]
    assert rows[1]["first_mean"] == evaluated(first)[both]
    assert rows[1]["own_mean"] == evaluated(shifted)[both]
    assert rows[1]["difference"] == rows[1]["own_mean"] - rows[1]["first_mean"]
    assert rows[1]["mean"] == pytest.approx(statistics.fmean(evaluated(shifted).values()))
    assert rows[2]["difference"] is None
    for run in (first, shifted, strange):
        run.close()


def test_the_page_says_where_no_task_is_shared(runs):
    app = make_app([path.parents[2] for path in runs])
    pages = app.state.pages
    ids = [entry["id"] for path in runs for entry in pages.entries() if entry["path"] == str(path)]
    for name in ids:
        pages.runs.get(name).refresh()
    page = TestClient(app, base_url="http://localhost").get("/compare", params={"run": ids}).text
    assert page.count("shares no task with 1, so the two cannot be compared") == 1
    assert "1 →" in page
    pages.runs.close()


def test_the_first_that_has_an_evaluation_is_compared_with():
    found = compare([("a", {}), ("b", {"x": 0.0, "y": 1.0}), ("c", {"x": 1.0, "y": 1.0})])
    assert (found["first"], found["rows"][1]["difference"]) == (2, 0.5)
    assert "without an evaluation: a" in found["note"]


def test_an_evaluation_of_any_size_counts(tmp_path):
    journal = Journal(tmp_path / "journal")
    for version in (1, 2):
        for ordinal in range(12_000):
            write_sample(
                journal, ordinal, is_eval=True, version=version, reward=float(version), task={"question": f"{ordinal}?"}
            )
    journal.close()
    with Run(tmp_path) as run:
        run.refresh()
        found = run.last_evaluation()
    assert len(found) == 12_000
    assert set(found.values()) == {2.0}


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ({"query_id": "3+4", "answer": "7"}, {"query_id": "3+4", "answer": "7", "ordinal": 5}, True),
        ({"query_id": "3+4"}, {"query_id": "3+5"}, False),
        ({"question": "a", "ordinal": 1}, {"ordinal": 2, "question": "a", "taskset": "other"}, True),
        ({"query_id": "7", "question": "a"}, {"query_id": "7", "question": "b"}, False),
        ({"query_id": 7, "question": "a"}, {"query_id": 7, "question": "a"}, True),
    ],
)
def test_a_task_is_known_by_its_query_id_or_its_content(first, second, is_same):
    assert (identity_of_task(first) == identity_of_task(second)) == is_same
