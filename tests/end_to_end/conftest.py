"""What the tests of the examples share: the command that a user types, and what its run left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class FinishedRun:
    """The directory of a run that ended well, what it printed, and whether it was as long as its file says."""

    directory: Path
    output: str
    is_whole: bool

    @property
    def evaluations(self) -> dict[str, dict[str, float]]:
        """The scores of the eval stages, by the stage's name."""
        return json.loads((self.directory / "summary.json").read_text())["eval"]

    def steps(self, metric: str, stage: str = "grpo") -> list[dict[str, Any]]:
        """The metrics of the steps of a stage (``""``: of a file without stages) that report ``metric``."""
        lines = (self.directory / stage / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if metric in record]

    def last_rollouts(self, stage: str = "grpo") -> str:
        """The readable trajectories of the last step that wrote some."""
        return max((self.directory / stage / "rollouts").glob("step-*.txt")).read_text()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs that learn come first: side by side with others, the longest must not begin last."""
    items.sort(key=lambda item: "run_example" not in getattr(item, "fixturenames", ()))


@pytest.fixture
def run_example(request, tmp_path) -> Callable[..., FinishedRun]:
    """Carries out ``rollwright run examples/NAME.yaml key=value …``; ``shortened``: left out with ``--whole-examples``."""

    def run(name: str, *overrides: str, shortened: Sequence[str] = ()) -> FinishedRun:
        is_whole = request.config.getoption("--whole-examples")
        command = [
            sys.executable,
            "-m",
            "rollwright",
            "run",
            f"examples/{name}.yaml",
            f"cluster.fileroot={tmp_path}",
            *overrides,
            *(() if is_whole else shortened),
        ]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
        assert done.returncode == 0, done.stderr[-3000:]
        (directory,) = tmp_path.glob("*/trial")
        return FinishedRun(directory, done.stdout, is_whole)

    return run
