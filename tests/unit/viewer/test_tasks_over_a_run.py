"""Held-out tasks over evaluations: which flipped, in which order they are shown, and what a page of a task shows."""

from __future__ import annotations

import csv
import html
import io
import re

import pytest
from starlette.testclient import TestClient
from test_index import write_sample
from test_whole_run import TASKS, whole  # noqa: F401  (a fixture)

from rollwright.experience.journal.writing import Journal
from rollwright.viewer.evaluations import Evaluation, evaluations_of
from rollwright.viewer.run import Run
from rollwright.viewer.server import make_app
from rollwright.viewer.tasks import differing_rows, history_of, task_rows


def evaluations(**rewards):
    """Evaluations v0, v1, …; each argument is a task with its rewards in them."""
    count = len(next(iter(rewards.values())))
    columns = [{task: own[place] for task, own in rewards.items() if own[place] is not None} for place in range(count)]
    return [Evaluation("", version, rewards=column) for version, column in enumerate(columns)]


def test_flips_come_first_and_the_lost_before_the_gained():
    rows = task_rows(
        evaluations(
            always=[1, 1, 1], gained=[0, 0, 1], never=[0, 0, 0], lost=[1, 1, 0], unsteady=[0, 1, 0], partly=[None, 0, 1]
        )
    )
    assert [(row.task, row.kind, row.change, row.crossings) for row in rows] == [
        ("lost", "lost", -1, 1),
        ("gained", "gained", 1, 1),
        ("partly", "gained", 1, 1),
        ("unsteady", "unsteady", 0, 2),
        ("never", "never", 0, 0),
        ("always", "always", 0, 0),
    ]
    assert rows[2].rewards == [None, 0, 1]


@pytest.mark.parametrize(("reward", "kind"), [(1.0, "always"), (0.0, "never"), (-1.0, "never")])
def test_rewards_that_are_all_equal_are_solved_above_0(reward, kind):
    assert [row.kind for row in task_rows(evaluations(a=[reward], b=[reward]))] == [kind, kind]


def test_rewards_of_any_range_have_a_middle():
    rows = {row.task: row.kind for row in task_rows(evaluations(a=[-4.0, 2.0], b=[-2.0, -1.5], c=[1.0, 2.0]))}
    assert rows == {"a": "gained", "b": "never", "c": "always"}


def test_rewards_that_differ_by_less_than_a_thousandth_are_equal():
    assert [(row.kind, row.change) for row in task_rows(evaluations(a=[-0.33338, -0.33336]))] == [("never", 0)]


def test_two_runs_differ_in_the_tasks_of_both_that_have_other_rewards():
    first, second = evaluations(lost=[1, 0], gained=[0, 1], partly=[0, 0.25], same=[1, 1], alone=[1, None])
    assert [row.task for row in differing_rows(first, second)] == ["lost", "gained", "partly"]


@pytest.fixture
def evaluated(tmp_path):
    """A run that evaluated four tasks at three versions: with one sample, and at the last also with three."""
    journal = Journal(tmp_path / "run" / "journal")
    for version, rewards in ((0, [1.0, 0.0, 0.0, 1.0]), (5, [1.0, 1.0, 0.0, 1.0]), (9, [0.0, 1.0, 0.0, 1.0])):
        for ordinal, (task, reward) in enumerate(zip(TASKS, rewards, strict=True)):
            write_sample(journal, ordinal, is_eval=True, version=version, reward=reward, task=task)
    for ordinal, task in enumerate(TASKS, 10):
        for index in range(3):
            write_sample(journal, ordinal, index, is_eval=True, version=9, reward=float(index == 0), task=task)
    journal.close()
    return tmp_path / "run"


def test_the_larger_of_two_evaluations_of_one_version_counts(evaluated):
    with Run(evaluated) as run:
        run.refresh()
        found = evaluations_of(run.index)
        assert [each.version for each in found] == [0, 5, 9]
        assert list(found[0].rewards.values()) == [1.0, 0.0, 0.0, 1.0]
        assert list(found[2].rewards.values()) == pytest.approx([1 / 3] * 4)
        assert found[2].groups["0+1"] == "eval:10@v9"
        history = history_of(run, "0+1")
        assert [(group["group"], group["version"], len(group["samples"])) for group in history] == [
            ("eval:0@v0", 0, 1),
            ("eval:0@v5", 5, 1),
            ("eval:0@v9", 9, 1),
            ("eval:10@v9", 9, 3),
        ]
        assert [group["reward"] for group in history] == pytest.approx([1.0, 1.0, 0.0, 1 / 3])


def client_of(place):
    app = make_app([place])
    for entry in app.state.pages.entries():
        app.state.pages.runs.get(entry["id"]).refresh()
    return TestClient(app, base_url="http://localhost")


def test_a_row_leads_to_the_answers_over_versions(evaluated):
    client = client_of(evaluated)
    page = html.unescape(client.get("/run/run/evaluations").text)
    rows = re.findall(r'<a data-open href="([^"]+)">([^<]+)</a></td><td class="kind (\w+)">', page)
    assert [(name, kind) for _, name, kind in rows] == [("0+1", "lost"), ("3+1", "lost"), ("1+1", "unsteady"), ("2+1", "never")]
    assert page.count('class="cell q6"') == 2 + 3 + 0  # 1, in v0 and v5
    only = html.unescape(client.get("/run/run/evaluations?set=0&show=never").text)
    assert re.findall(r'<a data-open href="[^"]+">([^<]+)</a></td><td class="kind', only) == ["2+1"]
    table = list(csv.DictReader(io.StringIO(client.get("/run/run/evaluations?format=csv").text)))
    assert (table[0]["task"], table[0]["v0"], float(table[0]["v9"])) == ("0+1", "1.0", pytest.approx(1 / 3))
    answers = client.get(rows[0][0])
    assert answers.status_code == 200
    assert re.findall(r'<a data-open href="/run/run/group/([^"]+)">', answers.text) == [
        "eval:0@v0",
        "eval:0@v5",
        "eval:0@v9",
        "eval:10@v9",
    ]
    assert client.get("/run/run/task/nothing").status_code == 404
    assert len(client.get(f"{rows[0][0]}?format=jsonl").text.splitlines()) == 6


def test_a_whole_run_compares_its_stages(whole):  # noqa: F811
    client = client_of(whole.parents[1])
    page = html.unescape(client.get("/run/made~run/evaluations").text)
    assert re.findall(r'<th scope="col" class="cell" title="([^"]+)"', page) == ["before", "after"]
    rows = re.findall(r'<a data-open href="([^"]+)">([^<]+)</a></td><td class="kind (\w+)">', page)
    assert [(name, kind) for _, name, kind in rows] == [
        ("0+1", "gained"),
        ("1+1", "gained"),
        ("3+1", "never"),
        ("2+1", "always"),
    ]
    task = client.get(rows[0][0]).text
    assert "/run/made~run~before/group/eval:0@v0" in task
    assert "/run/made~run~after/group/eval:0@v0" in task
    assert "no evaluation" in client.get("/run/made~run~grpo/evaluations").text
