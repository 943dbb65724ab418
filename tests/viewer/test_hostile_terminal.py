"""The terminal viewer over written runs: what a model said does nothing there."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor

from rich.segment import Segment
from test_safety import ESCAPE, HOSTILE
from written_runs import WrittenRun

from rollwright.viewer.terminal import Viewer
from rollwright.viewer.terminal_samples import TokenView

MARKUP = "[bold red]red[/] [@click=app.quit]leave[/] [link=https://example.com]x[/link] [/]"
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u200b\u202a-\u202e]")


def strips(app):
    return app.screen._compositor.render_strips()


async def until(pilot, text):
    for _ in range(900):  # a busy machine is no fault
        await pilot.pause(0.1)
        if text in (shown := "\n".join(strip.text for strip in strips(pilot.app))):
            return shown
    raise AssertionError(f"{text} did not come:\n{shown}")


def apart(coroutine):
    """Run it in a thread: the browser of other tests has a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def test_hostile_text_is_only_shown(tmp_path):
    said = [*HOSTILE, MARKUP]
    run = WrittenRun(tmp_path / "hostile" / "run", said=lambda ordinal, index: said[(ordinal * 4 + index) % len(said)])
    run.write_step(2)
    run.metrics.write(2, {f"{MARKUP}{ESCAPE}": 1.0, "reward": 0.5})
    run.close()
    apart(look_at_all(tmp_path, said))


async def look_at_all(root, said):
    app = Viewer([root])
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, "8 samples")
        await pilot.press("s")
        await until(pilot, "accepted")
        places = {}
        for place in range(8):
            if place:
                await pilot.press("down")
            places[app.screen.query_one("Table").chosen] = place
        await pilot.press("home", "enter")
        for key in places:
            await until(pilot, f"sample {key} ·")
            for keys in ([], ["v"], ["v", "c"], ["c"]):
                await pilot.press(*keys)
                await pilot.pause()
                for strip in strips(app):
                    assert not CONTROLS.search(strip.text), (key, strip.text)
                    assert not any(has_link(segment) for segment in strip), (key, strip.text)
            shown = "".join(piece for line in app.screen.query_one(TokenView).lines for _, piece, _ in line)
            text = said[int(key.partition("/")[0]) * 4 + int(key.partition("/")[2])]
            if text is MARKUP:
                assert MARKUP in shown.replace("␣", " ")
            elif text == HOSTILE[1]:
                told = shown.replace("·", "")  # a part of a character
                assert "␛[31mred␛]0;title␇⟨U+202E⟩evil" in told
            await pilot.press("j")
        assert app.is_running


def has_link(segment: Segment) -> bool:
    return segment.style is not None and (segment.style.link is not None or "@click" in segment.style.meta)
