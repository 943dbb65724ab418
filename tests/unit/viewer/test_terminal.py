"""The viewer on a terminal, over a run that was recorded: from the list to a token, by keys alone."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from rich.cells import cell_len

from rollwright.cli.view import view
from rollwright.errors import ConfigError
from rollwright.tracking.readable import sparkline
from rollwright.viewer import sample_view
from rollwright.viewer.run import Run
from rollwright.viewer.terminal import Viewer
from rollwright.viewer.terminal_parts import Table, curve
from rollwright.viewer.terminal_samples import TokenView, query_of, style_of


def seen(app):
    """The text of the screen."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


async def until(pilot, *texts):
    """Wait until the screen has all of these texts."""
    for _ in range(400):
        await pilot.pause(0.1)
        if all(text in seen(pilot.app) for text in texts):
            return seen(pilot.app)
    raise AssertionError(f"{texts} did not come:\n{seen(pilot.app)}")


async def test_from_the_runs_to_the_lowest_sample_of_a_step(recorded_run):
    app = Viewer([recorded_run])
    async with app.run_test(size=(120, 40)) as pilot:  # one run only is opened at once
        await until(pilot, "viewed/run · finished · step 3", "eval/reward", "▲", "55 samples")
        assert app.screen.query_one(Table).chosen == "reward"
        await until(pilot, f"step 3: {Run(recorded_run).curves.last('reward'):.4g}"[:12])
        await pilot.press("left", "enter")
        text = await until(pilot, "16 samples", "lowest reward first", "accepted")
        with Run(recorded_run) as run:
            lowest = run.search(step=2, order="reward")["samples"]
            assert app.screen.query_one(Table).chosen == lowest[0]["key"]
            assert all(each["key"] in text for each in lowest)
            await pilot.press("o")
            await until(pilot, "highest reward first")
            assert app.screen.query_one(Table).chosen == lowest[0]["key"]  # the choice stays
            await pilot.press("o")
            await until(pilot, "lowest reward first")
            await pilot.press("home", "enter")
            await until(pilot, f"sample {lowest[0]['key']} · 1 of 16", "[Advantage]")
            row = run.sample(lowest[0]["key"])["rows"][0]
            parts = [run.sample(each["key"])["parts"] for each in lowest[:2]]
        went_wrong = [0 if each is None else each["token"] for each in parts]  # is pointed at
        await until(pilot, f"#{went_wrong[0]}  id", "it parts from every better sample" if parts[0] else "Advantage")
        tokens = app.screen.query_one(TokenView)
        shown = "".join(piece for line in tokens.lines for _, piece, is_own in line if is_own)
        assert shown == "".join(
            "␣" * len(text) if text.strip(" ") == "" else text for text in row["texts"]
        )  # spaces are visible
        place = next(index for index, is_sampled in enumerate(row["mask"]) if is_sampled)
        await pilot.press("home", *["right"] * place)
        value = sample_view.number(row["advantages"][place])
        await until(pilot, f"#{place}  id {row['ids'][place]}", f"advantage {value}", "entropy", "trainer log-prob", "version")
        await pilot.press("j")
        await until(pilot, f"sample {lowest[1]['key']} · 2 of 16", f"#{went_wrong[1]}")
        await pilot.press("k")
        await until(pilot, f"sample {lowest[0]['key']} · 1 of 16")
        await pilot.press("g")
        await until(pilot, f"group {lowest[0]['group']}, trained")
        await pilot.press("u", "u", "u", "u")
        await until(pilot, "1 run below", "finished")
        await pilot.press("u")  # the first level stays
        assert await until(pilot, "1 run below")


async def test_overlays_values_chat_and_keys(recorded_run):
    app = Viewer([recorded_run])
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, "55 samples", "eval/reward")
        await pilot.press("slash", *"step=1", "enter")
        await until(pilot, "16 samples", "accepted")
        await pilot.press("enter")
        await until(pilot, "[Advantage]")
        tokens = app.screen.query_one(TokenView)
        for title in ("Engine log-prob", "Trainer log-prob", "Difference", "Entropy", "Version", "Trained", "Advantage"):
            await pilot.press("o")
            await until(pilot, f"[{title}]")
        await pilot.press("v")
        await until(pilot, "‹")
        with Run(recorded_run) as run:
            lowest = run.search(step=1, order="reward")["samples"][0]
            mask = run.sample(lowest["key"])["rows"][0]["mask"]
        marks = [number for line in tokens.lines for number, piece, _ in line if piece.startswith("‹")]
        assert marks == [number for number, is_trained in enumerate(mask) if is_trained]  # each trained token has its value
        assert max(sum(cell_len(piece) for _, piece, _ in line) for line in tokens.lines) <= 120
        await pilot.press("v", "c")
        await until(pilot, "── assistant", "── tool calculator")
        await pilot.press("c", "question_mark")
        await until(pilot, "Ten lines down")
        await pilot.press("question_mark", "t")
        await until(pilot, "[Advantage]")
        assert app.theme == "textual-light"
        assert not app.screen.query("HelpPanel")


async def test_the_search_takes_the_filters_of_addresses_and_shows_why_a_sample_failed(recorded_run):
    app = Viewer([recorded_run])
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, "55 samples", "eval/reward")
        await pilot.press("slash", *"step=x", "enter")
        await until(pilot, "'x' is no number and no range")
        await pilot.press("slash", *["backspace"] * 6, *"status=failed", "enter")
        await until(pilot, "1 samples", "ValueError: the calculator is broken")
        await pilot.press("enter")
        await until(pilot, "No tokens were kept", "Traceback (most recent call last)", "the calculator is broken")
    assert query_of("step=2 a tool=add b=c") == {"step": "2", "tool": "add", "text": "a b=c"}


async def test_it_follows_a_run_that_writes(copied_run):
    whole = (copied_run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    before = [line for line in whole if json.loads(line)["step"] < 3]
    (copied_run / "metrics.jsonl").write_bytes(b"".join(before))
    app = Viewer([copied_run])
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, "step 2 of 3", "▲")
        with (copied_run / "metrics.jsonl").open("ab") as file:
            await asyncio.to_thread(file.write, b"".join(whole[len(before) :]))
        await until(pilot, "step 3 of 3", "step 3: ")


def test_values_are_told_without_colour():
    plain = style_of("p5 plus", _black()), style_of("n5 minus", _black())
    assert [(style.underline, style.italic) for style in plain] == [(True, None), (None, True)]
    assert style_of("q6", _black()).bgcolor != style_of("q1", _black()).bgcolor


def _black():
    from textual.color import Color

    return Color(0, 0, 0)


def test_curves_of_characters():
    assert sparkline([0.0, None, 0.5, 1.0], 8) == "▁▅█"
    assert len(sparkline(list(range(100)), 16)) == 16
    up = curve([[0, 0.0], [1, 1.0]], 4, 2)
    assert [len(row) for row in up] == [4, 4]
    assert [up[1][0] == " ", up[0][3] == " ", up[0][0] == " "] == [False, False, True]
    assert curve([[0, float("nan")]], 3, 1) == ["   "]
    assert curve([[5, 2.0]], 3, 1) != ["   "]


def test_the_command_says_what_it_needs(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="needs a terminal"):
        view([tmp_path], terminal=True)
    with pytest.raises(ConfigError, match="serves no pages"):
        view([tmp_path], terminal=True, port=7000)
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "rollwright.viewer.terminal", None)
    with pytest.raises(ConfigError, match=r"needs the package .*pip install 'rollwright\[view\]'"):
        view([tmp_path], terminal=True)
