"""Every view of runs that an engine sampled and a trainer trained; ``--view-runs DIR`` looks at runs of your own."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest
from served_runs import serve

RECORDED = Path(__file__).parents[1] / "unit" / "viewer" / "recorded.py"


@pytest.fixture(scope="module")
def recorded(request, tmp_path_factory) -> Path:
    """Runs that were recorded: a small one, or those that the option names."""
    if given := request.config.getoption("--view-runs"):
        return Path(given)
    root = tmp_path_factory.mktemp("recorded")
    spec = importlib.util.spec_from_file_location("recorded", RECORDED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.record_run(root, request.getfixturevalue("tiny_model"))
    return root


def test_every_view_of_every_recorded_run(watched, recorded):
    served = serve([recorded])
    try:
        tab = watched(origin=served.url)
        tab.visit("/")
        runs = [link.get_attribute("href") for link in tab.page.locator("[data-open]").all()]
        assert runs
        for url in runs:
            run = served.pages.runs.get(url.removeprefix("/run/").replace("~", "/"))
            views = [url, f"{url}/config"]
            if run.has_journal:
                views += [f"{url}/{name}" for name in ("steps", "timeline", "weights", "search")]
                for step in run.steps()[-1:]:
                    views.append(f"{url}/step/{step['step']}")
                samples = [*run.search(limit=2)["samples"], *run.search(is_eval=True, limit=1)["samples"]]
                samples += run.search(status="failed", limit=1)["samples"]
                for sample in samples:
                    key = sample["key"].replace("#", "%23")
                    views.append(f"{url}/group/{sample['group']}")
                    views += [f"{url}/sample/{key}?view={view}" for view in ("chat", "tokens", "table", "requests")]
            for view in views:
                assert tab.visit(view).status == 200, view
                assert tab.page.locator("h1").count() == 1
    finally:
        served.stop()


def test_the_command_prints_its_address_and_ends_with_ctrl_c(runs):
    command = [sys.executable, "-m", "rollwright", "view", str(runs), "--port", "0", "--no-browser"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a suite that runs in the background is started deaf to it
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        assert process.stdout is not None
        address = re.match(r"(http://127\.0\.0\.1:\d+)/", process.stdout.readline())
        assert address is not None
        assert "sums/first" in httpx.get(address[1]).text
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130  # as every command


def test_the_command_says_where_no_run_is(tmp_path):
    from rollwright.cli.main import main

    assert main(["view", str(tmp_path / "nothing"), "--no-browser"]) == 1
