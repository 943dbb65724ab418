"""The display: sparkline, plain lines, and the live picture as a terminal would show it."""

import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollwright.errors import ConfigError
from rollwright.tracking import progress
from rollwright.tracking.progress import ProgressDisplay
from rollwright.tracking.readable import sparkline, stopwatch


def test_sparkline_rises_with_the_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5]) == "▁▁▁"
    assert sparkline([0.5], low=0.0, high=1.0) == "▅"
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert sparkline([]) == ""


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300), st.integers(1, 60))
def test_sparkline_never_fails_and_never_overflows(values, width):
    assert len(sparkline(values, width)) == min(len(values), width)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.4, "59s"), (187, "3:07"), (8049, "2:14:09")])
def test_durations(seconds, text):
    assert stopwatch(seconds) == text


def steps(display):
    with display:
        display.evaluation(0, 0.31)
        for step in (1, 2):
            display.step(
                step,
                0.25 * step,
                generate_tokens_per_second=8123.4,
                train_tokens_per_second=4000,
                staleness=0.5,
                seconds={"generate": 3.0, "train": 1.0, "reward": 0.001},
                facts={"length": 31.234},
            )


def test_a_plain_line_tells_a_step():
    stream = io.StringIO()
    steps(ProgressDisplay(2, mode="plain", stream=stream))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "eval after step 0/2 | reward 0.310"
    assert lines[1].startswith(
        "step 1/2 | reward 0.250 | generate 8,123 tok/s | train 4,000 tok/s | staleness 0.5 | length 31.23 | "
    )
    assert "(generate 3.0s train 1.0s)" in lines[1]
    assert ", left " in lines[2]
    assert len(lines) == 3
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_come_every_ten_steps_with_means():
    stream = io.StringIO()
    with ProgressDisplay(25, mode="plain", stream=stream) as display:
        for step in range(1, 26):
            display.step(step, step, seconds={"train": 1.0} if step % 2 else {"train": 1.0, "eval": 4.0})
            if step % 2 == 0:
                display.evaluation(step, step / 100)
    lines = [line.split(" | ") for line in stream.getvalue().splitlines()]
    assert [line[:2] for line in lines] == [
        ["step 1/25", "reward 1.000"],
        ["eval after step 2/25", "reward 0.020"],
        ["step 10/25", "reward 6.000"],
        ["eval after step 10/25", "reward 0.100"],
        ["step 20/25", "reward 15.500"],
        ["eval after step 20/25", "reward 0.200"],
        ["step 25/25", "reward 23.000"],
    ]
    assert "(train 1.0s eval 2.0s)" in lines[4][2]


def test_an_early_end_says_why_and_leaves_no_step_untold():
    stream, file = io.StringIO(), io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    for mode in ("plain", "live"):
        with ProgressDisplay(400, mode=mode, console=console, stream=stream) as display:
            for step in range(1, 13):
                display.step(step, step)
            display.evaluation(12, 0.37)
            display.done("as good as asked for")
    lines = stream.getvalue().splitlines()
    assert lines[-2].startswith("step 12/400 | reward 11.500")
    assert lines[-1] == "done after step 12/400: as good as asked for"
    last = file.getvalue()[file.getvalue().rindex("╭") :]
    assert "done: as good as asked for" in last
    assert "left" not in last


def test_slow_steps_have_a_line_each(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with ProgressDisplay(9, mode="plain", stream=stream) as display:
        for step in range(1, 5):
            display.step(step, 0.5)
    assert len(stream.getvalue().splitlines()) == 4


def test_auto_is_plain_where_the_output_is_no_terminal(capsys):
    display = ProgressDisplay(2)
    assert display.mode == "plain"
    steps(display)
    assert "step 2/2" in capsys.readouterr().out


def test_none_is_silent(capsys):
    steps(ProgressDisplay(2, mode="none"))
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_live_picture(width):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=30, color_system=None)
    steps(ProgressDisplay(2, mode="live", title="quickstart/grpo", console=console))
    text = file.getvalue()
    for expected in (
        "quickstart/grpo",
        "2/2",
        "0.500",
        "▁█",
        "0.310 @0",
        "8,123 tok/s",
        "generate 75%",
        "train 25%",
        "done",
    ):
        assert expected in text
    last = text[text.rindex("╭") :]
    assert max(len(line) for line in last.splitlines() if line.startswith(("│", "╭", "╰"))) <= width


def test_a_bar_follows_a_count_that_is_kept_elsewhere(monkeypatch):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(progress.logging, "console", lambda: console)
    done = [0.0]
    with progress.progress_bar(40, "evaluating, greedy", show=True, count=lambda: done[0]):
        for done[0] in (7.0, 40.0):
            time.sleep(0.25)  # drawn ten times a second
    assert all("evaluating, greedy" in file.getvalue() and number in file.getvalue() for number in ("7/40", "40/40"))


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="auto, live, plain, none"):
        ProgressDisplay(1, mode="fancy")


def test_an_evaluation_is_a_mean_reward():
    stream = io.StringIO()
    display = ProgressDisplay(4, mode="plain", stream=stream)
    display.evaluation(2, -0.1)
    assert stream.getvalue() == "eval after step 2/4 | reward -0.100\n"


def test_transformers_shows_no_bars_while_a_model_is_loaded_or_saved(tiny_model, tmp_path, capfd):
    from rollwright.config.sections import TrainEngineConfig
    from rollwright.inference.backends.builtin.engine import BuiltinEngine
    from rollwright.training.hf_checkpoint import save_model
    from rollwright.training.model import load_model

    BuiltinEngine(str(tiny_model), kv_cache_bytes=1 << 20).destroy()
    save_model(load_model(TrainEngineConfig(path=str(tiny_model), device="cpu")), tmp_path / "saved")
    shown = "".join(capfd.readouterr())
    assert "Loading weights" not in shown
    assert "it/s" not in shown
