"""Make the pictures of README and docs, each from a real run of an example, light and dark: ``python scripts/make_pictures.py [NAME ...]``.

The examples run below ``--directory``; one that has finished there is not run again, and one that was interrupted goes on. Needs
Chromium (``apt-get install chromium``) and ``pip install -e '.[view,vision,test]'``.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright.viewer.run import Run

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
SCHEMES = {"light": "", "dark": "-dark"}  # colour scheme -> end of the file's name
WIDTH, SCALE, COLOURS = 1280, 1.5, 128
LARGEST = 150_000  # bytes of a picture
_NODES, _GROUPS = 16, 400  # most parts of a tree that a picture shows, and groups among which one is chosen


@dataclass(frozen=True)
class Picture:
    """A picture of a page of the viewer.

    Args:
        example: name of the example that is run.
        address: returns the page's address below ``/run/``, from the directory of the run.
        part: CSS selector of the part that is shown; the page from its top if empty.
        width, height: size of the window in CSS pixels; with height 0, the picture is as high as the page.
    """

    example: str
    address: Callable[[Path], str]
    part: str = ""
    width: int = WIDTH
    height: int = 0


def _page(stage: str = "", view: str = "") -> Callable[[Path], str]:
    """Return a function that makes the address of a view of a run, or of one of its stages."""
    return lambda run: "~".join(filter(None, [run.parent.name, run.name, stage])) + view


def _curves(example: str) -> Picture:
    """The curves of an example by which it is judged."""
    return Picture(example, _page(), part=".chart-group[open]:not([hidden]) .curves", width=900)


#: Pictures of pages, by the name of their file.
PICTURES = {
    "search-agent-group": Picture("search_agent", lambda run: _page("grpo", f"/group/{telling_group(run / 'grpo')}")(run)),
    "viewer-run": Picture("quickstart", _page()),
    "viewer-step": Picture("quickstart", _page("grpo", "/step/20"), height=860),
    "viewer-evaluations": Picture("quickstart", _page("grpo", "/evaluations?show=unsteady")),
    "viewer-tokens": Picture(
        "search_agent", lambda run: _page("grpo", f"/sample/{telling_sample(run / 'grpo')}?view=tokens")(run)
    ),
    "reward": _curves("quickstart"),
    "search-agent": _curves("search_agent"),
    "multi-turn": _curves("multi_turn"),
    "parallel-sums": _curves("parallel_sums"),
    "shop": _curves("shop"),
    "vision-counting": _curves("vision_counting"),
}
#: The picture of the viewer on a terminal, and the example that it shows.
TERMINAL, TERMINAL_EXAMPLE = "viewer-terminal", "search_agent"


def telling_group(path: Path) -> str:
    """Return the key of a group that shows what a prefix tree is for: the worst sample took a long way on its own, and others were right."""
    return _telling(path)[0]


def telling_sample(path: Path) -> str:
    """Return the key of the worst sample of ``telling_group``."""
    return _telling(path)[1]


def _telling(path: Path) -> tuple[str, str]:
    query = """
    SELECT ordinal FROM samples WHERE NOT is_eval AND NOT is_undone AND status = 'accepted' AND step IS NOT NULL
    GROUP BY ordinal HAVING min(reward) < max(reward) AND avg(reward) >= 0.6 ORDER BY max(calls) DESC, ordinal LIMIT ?"""
    found = []
    with Run(path) as run:
        for row in run.index.rows(query, _GROUPS):
            group = run.group(row["ordinal"])
            rewarded = [sample for sample in group["samples"] if sample["reward"] is not None]
            worst = min(rewarded, key=lambda sample: sample["reward"])
            nodes = len(group["tree"]["nodes"])
            if nodes <= _NODES and run.sample(worst["key"])["parts"] is not None:
                found.append((worst["calls"], nodes, worst["group"], worst["key"]))
    if not found:
        raise SystemExit(f"{path} has no group whose samples have several rewards: it cannot be shown.")
    return max(found)[2:]


# -- runs ----------------------------------------------------------------------------------------------------------------


def finished_run(directory: Path, example: str) -> Path:
    """Run an example below a directory, unless it has finished there, and index it. Returns the run's directory."""
    path = directory / "runs" / example / "trial"
    marker = path / "run.json"
    if not (marker.exists() and json.loads(marker.read_text()).get("finished")):
        subprocess.run([sys.executable, "-m", "rollwright", "run", example], cwd=directory, check=True)
    for part in (each for each in path.iterdir() if (each / "journal").is_dir()):
        with Run(part) as run:
            run.refresh()
    return path


@contextmanager
def viewer(directory: Path) -> Iterator[str]:
    """Start ``rollwright view`` in a directory, so that its pages name the runs as a reader would. Yields its address."""
    command = [sys.executable, "-m", "rollwright", "view", "runs", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            address = re.match(r"http://[\d.]+:\d+", said)
            if address is None:
                raise SystemExit(f"rollwright view did not print its address: {said}")
            yield address[0]
        finally:
            process.terminate()


# -- pictures ------------------------------------------------------------------------------------------------------------

#: The page is complete, nothing loads, and every chart that can be seen is drawn.
_AT_REST = """() => document.fonts.status === "loaded" && !document.querySelector(".htmx-request, .htmx-settling, main > .note[role=status], main progress")
    && [...document.querySelectorAll(".plot")].every((plot) => !plot.checkVisibility() || plot.querySelector("canvas, svg"))"""


def photograph(browser: Any, address: str, scheme: str, picture: Picture) -> bytes:
    """Return a PNG of a page at rest, as the browser draws it.

    Raises:
        ValueError: there is no such page.
    """
    context = browser.new_context(
        viewport={"width": picture.width, "height": picture.height or 900},
        device_scale_factor=SCALE,
        color_scheme=scheme,
        reduced_motion="reduce",
    )
    try:
        page = context.new_page()
        answer = page.goto(address, wait_until="networkidle")
        if not answer.ok:
            raise ValueError(f"{address} answered {answer.status}.")
        page.wait_for_function(_AT_REST)
        shot = page.locator(picture.part).first if picture.part else page
        whole = {} if picture.part else {"full_page": not picture.height}
        return shot.screenshot(animations="disabled", caret="initial", **whole)
    finally:
        context.close()


def write(name: str, png: bytes) -> None:
    """Write a picture with few colours.

    Raises:
        SystemExit: it is too large.
    """
    from PIL import Image

    file = IMAGES / f"{name}.png"
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(file, optimize=True)
    size = file.stat().st_size
    print(f"{file.relative_to(ROOT)}: {picture.width} x {picture.height}, {size / 1000:.0f} kB")
    if size > LARGEST:
        raise SystemExit(f"{file} is larger than {LARGEST / 1000:.0f} kB: show less of the page.")


def terminal_screen(run: Path) -> str:
    """Return the worst sample of a run's last step as an SVG of the viewer on a terminal, with the fonts of this machine."""
    from rollwright.viewer.terminal import Viewer

    async def draw() -> str:
        app = Viewer([run / "grpo"])
        async with app.run_test(size=(110, 26)) as pilot:

            async def until(text: str) -> str:
                for _ in range(600):
                    await pilot.pause(0.1)
                    shown = app.export_screenshot()
                    if text in re.sub(r"<[^>]+>", "", shown).replace("&#160;", " "):
                        return shown
                raise SystemExit(f"the viewer on a terminal did not show {text!r} within a minute.")

            await until(" samples")
            await pilot.press("enter")
            await until("accepted")
            await pilot.press("enter")
            return await until("Advantage")

    drawn = re.sub(r"@font-face \{.*?\}", "", asyncio.run(draw()), flags=re.DOTALL)
    return drawn.replace("Fira Code", "monospace")


def photograph_terminal(browser: Any, drawn: str) -> bytes:
    """Return a PNG of what ``terminal_screen`` returned."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 760})
    page.set_content(f"<body style='margin:0'>{drawn}</body>")
    try:
        return page.locator("svg").first.screenshot()
    finally:
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"pictures to make; all if none: {', '.join((*PICTURES, TERMINAL))}"
    )
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "pictures", help="where the examples run")
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - {*PICTURES, TERMINAL}:
        parser.error(f"there is no picture {', '.join(sorted(unknown))}: choose from {', '.join((*PICTURES, TERMINAL))}.")
    names = arguments.names or [*PICTURES, TERMINAL]
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("there is no Chromium: apt-get install chromium.")
    directory = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    examples = dict.fromkeys(TERMINAL_EXAMPLE if name == TERMINAL else PICTURES[name].example for name in names)
    runs = {example: finished_run(directory, example) for example in examples}
    screen = terminal_screen(runs[TERMINAL_EXAMPLE]) if TERMINAL in names else ""

    from playwright.sync_api import sync_playwright

    with viewer(directory) as origin, sync_playwright() as driver:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=chromium, args=options)
        for name in names:
            if name == TERMINAL:
                write(name, photograph_terminal(browser, screen))
                continue
            picture = PICTURES[name]
            address = f"{origin}/run/{picture.address(runs[picture.example])}"
            for scheme, end in SCHEMES.items():
                write(f"{name}{end}", photograph(browser, address, scheme, picture))
        browser.close()


if __name__ == "__main__":
    main()
