"""What a workflow reports of each sample is in its journal, and from there a column, a filter, an order, a histogram and a text."""

from __future__ import annotations

import csv
import io
import statistics

import msgspec
import pytest
from recorded import STEPS, TASKS, VERDICTS
from starlette.testclient import TestClient

import rollwright
from rollwright.errors import DataError
from rollwright.experience.journal.records import End, decode, encode
from rollwright.viewer.server import make_app


@pytest.fixture(scope="module")
def run(recorded_run):
    with rollwright.Run(recorded_run) as run:
        run.refresh()
        yield run


def test_rows_have_the_words_of_their_task_and_the_answer(run):
    samples = run.search(status="accepted", limit=-1)["samples"]
    assert {sample["words"] for sample in samples} == {task["question"] for task in TASKS}
    for sample in samples[:8]:
        said = run.sample(sample["key"])["messages"][-1]["text"]
        assert sample["answer"] == " ".join(said.split())
    assert run.group("3")["words"] == run.group("3")["task"]["question"]


def test_a_journal_has_what_its_episodes_reported(run):
    assert run.reported() == {"half": False, "spoken": False, "verdict": True}
    samples = run.search(status="accepted", limit=-1)["samples"]
    assert len(samples) == 4 * 4 * STEPS + 2 * STEPS
    for sample in samples:
        assert sample["figures"] == {
            "half": sample["reward"] / 2,
            "spoken": sample["length"],
            "verdict": VERDICTS[int(sample["reward"])],
        }
    (failed,) = run.search(status="failed")["samples"]
    assert failed["figures"] == {}
    assert sum(run.metrics(["rollout/half"])["series"]["rollout/half"][0]) > 0  # and the run's metrics have the mean
    assert not any("verdict" in name for name in run.curves.names())


def test_frames_have_them_as_columns_with_texts(run):
    table = run.frame("samples", eval=0, status="accepted")
    assert (table["report.half"] * 2 == table["reward"]).all()
    assert set(table["report.verdict"]) <= set(VERDICTS)
    assert table["words"].str.endswith("=").all()
    only = run.frame("samples", **{"report.verdict": "right", "eval": 0})
    assert set(only["report.verdict"]) == {"it's right"}


def test_they_filter_and_sort(run):
    found = run.search(report={"half": (0.5, 1)}, order="-report.spoken", limit=-1)["samples"]
    assert {sample["reward"] for sample in found} == {1.0, 2.0}
    assert [sample["length"] for sample in found] == sorted((sample["length"] for sample in found), reverse=True)
    assert len(found) == len(run.search(reward=(1, 2), limit=-1)["samples"])
    for query, told in (({"report": {"loud": 1}}, "report.half, report.spoken"), ({"order": "report.loud"}, "loud")):
        with pytest.raises(DataError, match=told):
            run.search(**query)
    with pytest.raises(DataError, match="is no number and no range"):
        run.search(report={"half": "high"})


def test_their_values_are_counted(run):
    samples = run.search(status="accepted", limit=-1)["samples"]
    spread = run.search(status="accepted", counted_by="report.half", limit=1)["spread"]
    assert {each["low"]: each["count"] for each in spread["bins"]} == {
        half: sum(sample["reward"] / 2 == half for sample in samples) for half in {sample["reward"] / 2 for sample in samples}
    }
    assert spread["mean"] == pytest.approx(statistics.fmean(sample["reward"] / 2 for sample in samples))
    texts = run.search(counted_by="report.verdict", limit=1)["spread"]["texts"]
    assert {each["text"]: each["count"] for each in texts} == {
        VERDICTS[reward]: count for reward in range(3) if (count := sum(sample["reward"] == reward for sample in samples))
    }


def test_the_page_has_columns_filters_and_a_histogram(run, recorded_run):
    app = make_app([recorded_run])
    pages = app.state.pages
    (entry,) = pages.entries()
    pages.runs.get(entry["id"]).refresh()
    client = TestClient(app, base_url="http://127.0.0.1")
    page = client.get(f"{entry['url']}/search?by=report.verdict&report.half=0.5..1&order=-report.spoken").text
    for text in (
        "it&#39;s right",
        'name="report.half" type="text" value="0.5..1"',
        'aria-sort="descending"',
        TASKS[0]["question"],
    ):
        assert text in page
    assert "report.verdict=it%27s+right" in page  # a click on a text filters by it
    assert "no sample of this run reported" in client.get(f"{entry['url']}/search?report.loud=1").text
    lines = list(csv.DictReader(io.StringIO(client.get(f"{entry['url']}/search?format=csv&status=accepted").text)))
    assert {line["report.verdict"] for line in lines} <= set(VERDICTS)
    key = lines[0]["key"]
    assert lines[0]["report.verdict"].replace("'", "&#39;") in client.get(f"{entry['url']}/sample/{key}").text
    pages.runs.close()


def test_an_older_journal_has_no_figures():
    whole = msgspec.msgpack.decode(encode(End(3, "accepted", "", [], 1.0, figures={"half": 0.5})))
    old = decode(msgspec.msgpack.encode(whole[:-1]))
    assert isinstance(old, End)
    assert (old.outcome, old.figures) == ("accepted", {})
