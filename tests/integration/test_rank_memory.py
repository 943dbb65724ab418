"""The benchmark of each rank's memory, with a small model: what two ranks hold is half of what one holds, and one tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "rank_memory.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_of_a_rank_falls_with_their_number(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--quick", "--ranks", "1,2", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    size = found["machine"]["parameters"] / 2**20  # in MiB for one byte each
    held = {(row["ranks"], row["phase"]): row["MiB"] for row in found["results"]}
    largest, noise = 4 * 384 * 8192 / 2**20, 22.0  # the noise has what libraries load with the first forward pass
    for ranks in (1, 2):
        assert held[ranks, "load"] < 4 * size / ranks + largest + noise
        assert held[ranks, "probe"] < held[ranks, "update"]
        assert held[ranks, "state"] < 12 * size / ranks + noise  # weights and two moments, and nothing of an update
        assert held[ranks, "publish"] < held[ranks, "resume"] + 2 * 64 + largest + noise
    assert held[1, "load"] > 4 * size  # it is measured at all
    assert held[2, "load"] < held[1, "load"] - 1.5 * size
    assert held[2, "checkpoint"] < held[1, "checkpoint"] - 4 * size
