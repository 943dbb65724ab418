"""Runs of a sweep stand together in the viewer, under a heading that leads to their table."""

import pytest
from starlette.testclient import TestClient

from rollwright.tracking.run_directory import RunDirectory
from rollwright.tracking.sinks import JSONLSink
from rollwright.tracking.sweeps import SweepRun, write_sweep
from rollwright.viewer.server import make_app


def made(root, trial):
    run = RunDirectory(root, "sums", trial).claim(
        {"stages": [{"kind": "rl", "name": "grpo"}, {"kind": "eval", "name": "after"}]}
    )
    sink = JSONLSink(run.stage("grpo").metrics_file)
    sink.write(1, {"reward": 0.5})
    sink.close()
    run.finish()
    run.release()


@pytest.fixture
def client(tmp_path):
    members = [SweepRun(f"t-lr={lr}-seed={seed}", f"lr={lr}", seed) for lr in ("1e-4", "3e-4") for seed in ("1", "2")]
    for index, member in enumerate(members[:3]):
        made(tmp_path, member.trial)
        member.state, member.measures = "finished", {"after greedy": (0.5, 0.75, 0.25)[index]}
    members[3].state = "running"  # its process was killed
    made(tmp_path, "alone")
    write_sweep(tmp_path / "sums" / "t.sweep.json", members)
    (tmp_path / "sums" / "other.sweep.json").write_text("{damaged")
    with TestClient(make_app([tmp_path]), base_url="http://127.0.0.1:7111") as client:
        yield client


def test_the_list_groups_them(client):
    page = client.get("/").text
    assert page.index("Sweep sums/t") < page.index("t-lr=1e-4-seed=1/grpo") < page.index("t-lr=3e-4-seed=1/grpo")
    assert "4 runs, 3 finished" in page
    assert "Single runs" in page
    assert page.count('aria-label="sums/alone/grpo"') == 1


def test_its_page_has_means_intervals_and_states(client):
    page = client.get("/sweep/sums~t").text
    for expected in (
        "after greedy",
        "lr=1e-4",
        "0.625",
        "-0.963 … 2.213",
        "stopped",
        'href="/run/sums~t-lr%3D1e-4-seed%3D1~grpo"',
    ):
        assert expected in page, expected
    lines = client.get("/sweep/sums~t?format=csv").text.splitlines()
    assert lines[0] == "measure,setting,mean,low,high,values"
    assert lines[2].startswith("after greedy,lr=3e-4,0.25,")
    assert client.get("/sweep/sums~other").status_code == 404


def test_without_a_sweep_the_list_is_as_before(tmp_path):
    made(tmp_path, "alone")
    with TestClient(make_app([tmp_path]), base_url="http://127.0.0.1:7111") as client:
        page = client.get("/").text
    assert "Single runs" not in page
    assert "Sweep" not in page
