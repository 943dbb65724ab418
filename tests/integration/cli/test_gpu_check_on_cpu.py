"""The form of ``make gpu-check`` for CPUs, so that whoever has a GPU does not meet its first run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm import shared_warm

REPOSITORY = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1200)
def test_what_can_be_tried_on_a_cpu_passes(tmp_path):
    command = ["rollwright", "doctor", "--gpu", "--short", "--fileroot", str(tmp_path)]
    done = shared_warm().run(command, REPOSITORY, {}, timeout=1100)
    assert done.returncode == 0, done.stdout[-3000:]
    report = json.loads((tmp_path / "gpu-check" / "report.json").read_text())
    families, published = report["checks"]
    assert (families["state"], families["figures"]) == ("passed", {"families": 2, "equal": 2})
    assert published["state"] == "passed"
    assert published["figures"]["steps"] == 3
    assert published["figures"]["largest_difference_nats"] < 1e-3
    assert report["machine"]["torch"]
    assert "| families |" in (tmp_path / "gpu-check" / "table.md").read_text()
