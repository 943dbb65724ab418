"""The list of runs: filters, order, config keys as columns, and the tags and notes that the viewer keeps beside a run."""

import json
import re

import pytest
from starlette.testclient import TestClient

from rollwright.tracking.run_directory import RunDirectory
from rollwright.tracking.sinks import JSONLSink
from rollwright.viewer.run import Run
from rollwright.viewer.runs import Runs
from rollwright.viewer.server import make_app

ADDRESS = "http://127.0.0.1:7111"


def made(root, trial, reward, lr, is_finished=True):
    run = RunDirectory(root, "sums", trial).claim({"stages": []}, "off")
    (run.path / "config.yaml").write_text(f"actor: {{optimizer: {{lr: {lr}}}}}\nseed: 1\n")
    sink = JSONLSink(run.metrics_file)
    for step in (1, 2):
        sink.write(step, {"reward": reward * step / 2})
    sink.close()
    if is_finished:
        run.finish()
    run.release()
    return run.path


@pytest.fixture
def root(tmp_path):
    """Four runs: three that finished, one that stopped."""
    made(tmp_path, "low", 0.2, 1e-3)
    made(tmp_path, "high", 0.9, 1e-4)
    made(tmp_path, "middle", 0.5, 3e-4)
    made(tmp_path, "dead", 0.1, 1e-3, is_finished=False)
    return tmp_path


@pytest.fixture
def client(root):
    with TestClient(make_app([root]), base_url=ADDRESS) as client:
        yield client


def listed(client, address="/"):
    """The trials of a list, in its order."""
    page = client.get(address)
    assert page.status_code == 200
    return re.findall(r'data-open href="/run/sums~(\w+)"', page.text)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("sort=-reward", ["high", "middle", "low", "dead"]),
        ("sort=reward", ["dead", "low", "middle", "high"]),
        ("sort=run", ["dead", "high", "low", "middle"]),
        ("sort=-actor.optimizer.lr&q=reward=0.2..", ["low", "middle", "high"]),
        ("state=stopped", ["dead"]),
        ("q=mid", ["middle"]),
        ("q=reward=0.4..1&sort=reward", ["middle", "high"]),
        ("q=actor.optimizer.lr=1e-4", ["high"]),
        ("q=sums+seed=2", []),
    ],
)
def test_filters_and_orders_are_part_of_the_address(client, query, expected):
    assert listed(client, f"/?{query}") == expected


def test_a_wrong_filter_is_named_and_leaves_all(client):
    page = client.get("/?q=reward=many").text
    assert "is no number and no range" in page
    assert page.count("data-row") == 4


def test_chosen_config_keys_are_columns_and_in_the_file(client):
    page = client.get("/?keys=actor.optimizer.lr&sort=run").text
    assert re.findall(r"<td><code>([^<]*)</code></td>", page) == ["0.001", "0.0001", "0.001", "0.0003"]
    assert 'option value="actor.optimizer.lr"' in page
    lines = client.get("/?keys=actor.optimizer.lr&sort=run&format=csv").text.splitlines()
    assert lines[0].endswith("tags,note,actor.optimizer.lr")
    assert lines[1].endswith(",0.001")


def send(client, name, **changes):
    seen = json.loads(re.search(rf'/run/{name}/notes" data-notes="(.*?)"', client.get("/").text)[1].replace("&#34;", '"'))
    return client.post(f"/run/{name}/notes", json={**seen, **changes})


def test_tags_and_notes_are_kept_beside_the_run(client, root):
    answer = send(client, "sums~high", tags=["baseline", "best"], note="learns <b>fast</b>")
    assert answer.status_code == 200
    assert json.loads((root / "sums" / "high" / "notes.json").read_text()) == {
        "tags": ["baseline", "best"],
        "note": "learns <b>fast</b>",
    }
    assert listed(client, "/?tag=best") == ["high"]
    assert listed(client, "/?q=fast") == ["high"]
    page = client.get("/run/sums~high").text
    assert "learns &lt;b&gt;fast&lt;/b&gt;" in page
    assert 'href="/?tag=baseline"' in page
    with Run(root / "sums" / "high") as run:
        assert not any("notes" in each["message"] for each in run.missing())
    old = {"tags": [], "note": "", "seen": "0" * 16}  # as of somebody who saw none of this
    answer = client.post("/run/sums~high/notes", json=old)
    assert answer.status_code == 409
    assert "somebody else has changed" in answer.json()["error"]
    assert listed(client, "/?tag=best") == ["high"]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"tags": ["two words"]}, 422),
        ({"tags": ["x"] * 21}, 422),
        ({"note": "x" * 10_001}, 422),
        ({"path": "/etc/passwd"}, 422),
    ],
)
def test_what_is_no_tag_or_note_is_refused(client, root, changes, status):
    assert send(client, "sums~low", **changes).status_code == status
    assert not (root / "sums" / "low" / "notes.json").exists()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_other_pages_cannot_write(client, root, headers, status):
    body = json.dumps({"tags": ["x"], "note": "", "seen": ""})
    sent = {"Content-Type": "application/json", **headers}
    assert client.post("/run/sums~low/notes", content=body, headers=sent).status_code == status
    assert not (root / "sums" / "low" / "notes.json").exists()


def test_nothing_else_is_written_and_no_other_place(client, root):
    note = {"tags": [], "note": "x", "seen": ""}
    for address in ("/", "/run/sums~low", "/run/sums~low/config", "/run/sums~low/notes/", "/run/a/b/notes"):
        assert client.post(address, json=note).status_code == 405, address
    for name in ("..~..~etc", "sums~none", "%2Fetc"):
        assert client.post(f"/run/{name}/notes", json=note).status_code in (404, 405), name


def test_a_directory_that_cannot_be_written_is_named(client, root, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("rollwright.viewer.notes.write_json", refuse)
    answer = send(client, "sums~low", note="x")
    assert answer.status_code == 409
    assert "notes.json cannot be written" in answer.json()["error"]


def test_runs_that_take_too_long_are_read_in_the_background(root):
    runs = Runs(root)
    unread = runs.list(0.0)
    assert len(unread) == 4
    assert not all(entry["is_read"] for entry in unread)
    before = runs.stamp
    runs.read_in_background()
    runs._reading.join()
    assert runs.stamp != before
    assert all(entry["is_read"] for entry in runs.list(0.0))
    sink = JSONLSink(root / "sums" / "low" / "metrics.jsonl", resume_step=2)
    sink.write(3, {"reward": 0.75})
    sink.close()
    assert {entry["id"]: entry["reward"] for entry in runs.list()}["sums/low"] == 0.75
    runs.close()
