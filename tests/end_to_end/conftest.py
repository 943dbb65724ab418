"""What the tests of the examples share: the command that a user types, and what its run left behind."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from viewed_runs import CHROMIUM, click_to_the_worst_sample, headless_chromium, serve, visit_every_view, watched_tabs
from warm import shared_warm

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

    def look_at(self, stage: str = "grpo") -> None:
        """Visit every view of it in a real browser, and click from the list of runs to the tokens of a step's worst sample."""
        if CHROMIUM is None:
            warnings.warn(
                "there is no Chromium, so the views of the run are not looked at: apt-get install chromium", stacklevel=2
            )
            return
        served = serve([self.directory])
        try:
            with headless_chromium() as chromium, watched_tabs(chromium, served.url) as make:
                tab = make()
                assert visit_every_view(tab, served) > 20
                run = served.pages.runs.get(stage)
                worst = click_to_the_worst_sample(tab, run, stage, min(12, run.steps()[-1]["step"]))
                rows = run.sample(worst["key"])["rows"]
                assert tab.page.locator(".tokens .t").count() == sum(len(row["ids"]) for row in rows)
                assert all(row["advantages"] and row["trainer_logprobs"] for row in rows)
        finally:
            served.stop()

    def replay(self, stage: str = "grpo") -> None:
        """Run every recorded sample again without a model: each has to be equal."""
        told, log = self.directory / "replay.json", self.directory / "replay.log"
        done = shared_warm().start(["replay", str(self.directory / stage), "all", "--json", str(told)], REPOSITORY, log, {})
        assert done.wait(600) == 0, log.read_text()[-3000:]
        counts = json.loads(told.read_text())
        assert counts["equal"] == counts["episodes"] > 100


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs that learn come first: side by side with others, the longest must not begin last."""
    items.sort(key=lambda item: "run_example" not in getattr(item, "fixturenames", ()))


@pytest.fixture
def run_example(request, tmp_path) -> Callable[..., FinishedRun]:
    """Carries out ``rollwright run examples/NAME.yaml key=value …``; ``shortened``: left out with ``--whole-examples``."""

    def run(name: str, *overrides: str, shortened: Sequence[str] = ()) -> FinishedRun:
        is_whole = request.config.getoption("--whole-examples")
        overrides = (f"cluster.fileroot={tmp_path}", *overrides, *(() if is_whole else shortened))
        command = ["rollwright", "run", f"examples/{name}.yaml", *overrides]
        done = shared_warm().run(command, REPOSITORY, {"COLUMNS": "120"}, timeout=1500)
        assert done.returncode == 0, done.stderr[-3000:]
        (directory,) = tmp_path.glob("*/trial")
        return FinishedRun(directory, done.stdout, is_whole)

    return run
