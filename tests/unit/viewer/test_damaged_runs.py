"""A journal with a flipped byte, or cut at two thirds: the pages say what `rollwright check` says, and every link leads somewhere."""

from __future__ import annotations

import html
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from rollwright.cli.check import _looked_at
from rollwright.viewer.server import make_app

#: Parameters of links that show the same samples in another way.
OTHER_WAYS = ("format=", "sort=", "overlay=", "view=", "offset=", "reward=", "start=")


def damage(run: Path, how: str) -> None:
    for file in (run / "journal").glob("*.journal"):
        data = bytearray(file.read_bytes())
        if how == "flipped":
            data[len(data) // 10] ^= 0xFF
        else:
            del data[len(data) * 2 // 3 :]
        file.write_bytes(data)


@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_pages_say_what_is_missing_and_no_link_is_dead(copied_run, how):
    damage(copied_run, how)
    said = [line for _, problems in _looked_at(copied_run) for line in problems]
    assert any("journal" in line for line in said)
    app = make_app([copied_run])
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    app.state.pages.runs.get("run").refresh()
    page = html.unescape(client.get("/run/run").text)
    for line in said:
        assert line in page
    dead, seen, waiting = [], {"/"}, ["/"]
    while waiting:
        address = waiting.pop()
        answer = client.get(address)
        if answer.status_code != 200:
            dead.append((address, answer.status_code))
        for link in map(html.unescape, re.findall(r'href="(/[^"]*)"', answer.text)):
            is_other = link.startswith("/static") or any(way in link for way in OTHER_WAYS) or "/search" in urlsplit(link).path
            if not is_other and link not in seen and "list=" not in link:
                seen.add(link)
                waiting.append(link)
    assert dead == []
    assert len(seen) > 40
    steps = app.state.pages.runs.get("run").curves.points("reward")
    for step, _ in steps:  # a click on a curve
        assert client.get(f"/run/run/step/{step}").status_code == 200
    app.state.pages.runs.close()


def test_a_step_that_only_the_metrics_have_is_shown_with_what_is_known(copied_run):
    damage(copied_run, "cut")
    app = make_app([copied_run])
    app.state.pages.runs.get("run").refresh()
    page = TestClient(app, base_url="http://localhost").get("/run/run/step/3").text
    assert "The journal lacks the samples of this step" in page
    app.state.pages.runs.close()
