"""Two samples side by side: which tokens they share, and the page that shows it."""

from __future__ import annotations

import html
import re

import hypothesis.strategies as st
from hypothesis import given
from starlette.testclient import TestClient

from rollwright.viewer.pair_page import shared_tokens
from rollwright.viewer.server import make_app


def test_equal_parts_are_shared_and_others_not():
    first, second = shared_tokens([1, 2, 3, 4, 9], [1, 2, 7, 3, 9])
    assert first == [True, True, True, False, True]
    assert second == [True, True, False, True, True]
    assert shared_tokens([], [1]) == ([], [False])
    assert shared_tokens([5, 5], [5]) == ([True, False], [True])


@given(*[st.lists(st.integers(0, 3), max_size=30)] * 2)
def test_shared_tokens_are_a_common_subsequence(first, second):
    shared = shared_tokens(first, second)
    common = [
        [token for token, is_in in zip(each, own, strict=True) if is_in]
        for each, own in zip((first, second), shared, strict=True)
    ]
    assert common[0] == common[1]
    prefix = next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    assert all(shared[0][:prefix])


def test_the_page_marks_what_only_one_has(recorded_run):
    app = make_app([recorded_run])
    run = app.state.pages.runs.get("run")
    run.refresh()
    client = TestClient(app, base_url="http://localhost")
    first, second = (run.sample(f"0/{index}") for index in (0, 1))
    page = client.get("/pair", params={"sample": ["run 0/0", "run 0/1"]})
    assert page.status_code == 200
    sides = re.findall(r'<div class="tokens".*?</div>', page.text, re.DOTALL)
    expected = shared_tokens(first["rows"][0]["ids"], second["rows"][0]["ids"])
    for shown, own in zip(sides, expected, strict=True):
        classes = [found.split() for found in re.findall(r'<span class="(t\b[^"]*)"', shown)]
        assert ["differs" not in each for each in classes] == own
        assert [place for place, each in enumerate(classes) if "parts" in each] == [own.index(False)]
    same = client.get("/pair", params={"sample": "run 0/0", "beside": "0/0"}).text
    assert "the same" in same
    assert "differs" not in same
    overlaid = client.get("/pair", params={"sample": ["run 0/0", "run 0/1"], "overlay": "logprob"}).text
    assert 'aria-current="page">Engine log-prob' in overlaid
    refused = client.get("/pair", params={"sample": "run 0/0"})
    assert refused.status_code == 404
    assert "choose two" in html.unescape(refused.text)
    group = client.get("/run/run/group/0").text
    assert group.count('name="sample" value="run 0/') == len(run.group("0")["samples"])
