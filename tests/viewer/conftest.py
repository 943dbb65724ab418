"""A real browser, a server over recorded runs, and a check of every page that nothing leaves the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from viewed_runs import headless_chromium, serve, watched_tabs
from written_runs import WrittenRun


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """Two finished runs of eight steps."""
    root = tmp_path_factory.mktemp("runs")
    for trial, lr in (("first", 1e-3), ("second", 3e-4)):
        run = WrittenRun(root / "sums" / trial, lr=lr)
        for _ in range(8):
            run.write_step()
        run.close()
    return root


@pytest.fixture(scope="session")
def viewer(runs) -> Iterator[Any]:
    """A viewer of the recorded runs."""
    served = serve([runs])
    yield served
    served.stop()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless Chromium; it ends with the file that asked for it."""
    with headless_chromium() as browser:
        yield browser


@pytest.fixture
def watched(chromium, viewer) -> Iterator[Any]:
    """Makes a page that is closed at the end, where no fault and no foreign request may have come about."""
    with watched_tabs(chromium, viewer.url) as make:
        yield make
