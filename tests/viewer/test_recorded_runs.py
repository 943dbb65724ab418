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
from viewed_runs import serve, visit_every_view

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


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_every_view_of_every_recorded_run(watched, recorded, width, scheme):
    served = serve([recorded])
    try:
        assert visit_every_view(watched(width, scheme, served.url), served) > 20
    finally:
        served.stop()


def test_the_command_prints_its_address_and_ends_with_ctrl_c(runs):
    command = [sys.executable, "-m", "rollwright", "view", str(runs), "--port", "0", "--no-browser"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a suite that runs in the background is started deaf to it
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        try:
            assert process.stdout is not None
            address = re.match(r"(http://127\.0\.0\.1:\d+)/", process.stdout.readline())
            assert address is not None
            assert "sums/first" in httpx.get(address[1], timeout=60).text
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130  # as every command
        finally:
            process.kill()  # where it has not ended, it would be waited for


def test_the_command_says_where_no_run_is(tmp_path):
    from rollwright.cli.main import main

    assert main(["view", str(tmp_path / "nothing"), "--no-browser"]) == 1
