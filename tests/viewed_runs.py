"""Looking at runs as a person does: a real browser, a viewer that serves them, and every view of them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def headless_chromium() -> Iterator[Any]:
    """A Chromium without a screen. Its driver holds an event loop in this thread, which asynchronous tests need: end it with the file."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the browser: pip install 'rollwright[test]'"
    )
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@contextmanager
def watched_tabs(chromium: Any, origin: str) -> Iterator[Any]:
    """Makes tabs that are closed at the end, where no fault and no foreign request may have come about."""
    made: list[tuple[Any, Watched]] = []

    def make(width: int = 1280, scheme: str = "light", origin: str = origin) -> Watched:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True)
        context.set_default_timeout(90_000)  # a busy machine is no fault
        made.append((context, Watched(context.new_page(), origin)))
        return made[-1][1]

    yield make
    for context, tab in made:
        context.close()
        assert not tab.faults, tab.faults
        assert not tab.foreign, tab.foreign


class Watched:
    """A page of the browser, with what went wrong on it and what it asked of others than the viewer."""

    def __init__(self, page: Any, origin: str) -> None:
        self.page, self.origin = page, origin
        self.faults: list[str] = []
        self.foreign: list[str] = []
        page.on("console", lambda message: self.faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.faults.append(error.stack or str(error)))
        page.on("dialog", self._dialog)
        page.context.route("**/*", self._route)

    def _dialog(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _route(self, route: Any) -> None:
        if route.request.url.startswith((self.origin, "data:", "file:")):
            route.continue_()
        else:
            self.foreign.append(route.request.url)
            route.abort()

    def visit(self, address: str) -> Any:
        """Go to an address of the viewer."""
        return self.page.goto(self.origin + address)

    def follow(self, link: Any, pattern: str) -> None:
        """Click a link, and wait for the page that it leads to."""
        link.click()
        self.arrive(pattern)

    def arrive(self, pattern: str) -> None:
        """Wait for the page whose address has a pattern."""
        self.page.wait_for_url(re.compile(pattern))
        self.page.wait_for_function("!document.querySelector('.htmx-request, .htmx-settling, .htmx-swapping')")

    def fits(self) -> bool:
        """Whether nothing of the page is wider than the window."""
        return self.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth + 1")


def serve(places: list[Path]) -> Any:
    """A viewer in this process, indexed; its ``url``, ``stop``, ``app`` and ``pages``."""
    from rollwright.inference.server.service import ServerThread
    from rollwright.viewer.server import make_app, settings_of

    settings = settings_of("127.0.0.1", 0)
    app = make_app(places, settings)
    pages = app.state.pages
    for entry in pages.entries():
        if entry["has_journal"]:
            pages.runs.get(entry["id"]).refresh()
    thread = ServerThread(app, settings)

    def stop() -> None:
        thread.stop()
        pages.runs.close()

    return SimpleNamespace(url=thread.url, stop=stop, app=app, pages=pages)


def visit_every_view(tab: Watched, served: Any) -> int:
    """Visit every view of all runs that are served, and one sample of each kind that a run has. Returns how many pages that were."""
    tab.visit("/")
    urls = [link.get_attribute("href") for link in tab.page.locator("[data-open]").all()]
    assert urls
    views = ["/"] + [f"/compare?run={quote(url.removeprefix('/run/').replace('~', '/'))}" for url in urls[:1]]
    for url in urls:
        views += _views(served.pages.runs.get(url.removeprefix("/run/").replace("~", "/")), url)
    for view in views:
        assert tab.visit(view).status == 200, view
        assert tab.page.locator("h1").count() == 1, view
        assert tab.fits(), f"{view} is wider than the window"
    return len(views)


def _views(run: Any, url: str) -> Iterator[str]:
    yield from (url, f"{url}/config")
    if not run.has_journal:
        return
    yield from (f"{url}/task/{quote(task, safe='')}" for task in list(run.last_evaluation())[:1])
    yield from (
        f"{url}/{name}"
        for name in ("evaluations", "log", "steps", "timeline", "weights", "search", "search?text=a&order=reward")
    )
    steps = [step["step"] for step in run.steps()]
    yield from (f"{url}/step/{step}" for step in {*steps[:1], *steps[-1:]})
    samples = [*run.search(limit=1, order="reward")["samples"], *run.search(limit=1, order="-reward")["samples"]]
    samples += run.search(is_eval=True, limit=1)["samples"] + run.search(status="failed", limit=1)["samples"]
    for number, sample in enumerate(samples):
        yield f"{url}/group/{sample['group']}"
        overlay = ("advantage", "logprob", "version", "entropy")[number % 4]
        for view in ("chat", f"tokens&overlay={overlay}", "table", "requests"):
            yield f"{url}/sample/{quote(sample['key'])}?view={view}"


def click_to_the_worst_sample(tab: Watched, run: Any, name: str, step: int) -> dict[str, Any]:
    """From the list of runs to the tokens of the step's sample of lowest reward, in five clicks. Returns that sample."""
    tab.visit("/")
    clicks = {
        name: "/run/[^/]+$",
        "Steps": "steps$",
        str(step): f"step/{step}$",
        "Lowest reward": "/sample/",
        "Tokens": "view=tokens",
    }
    for click, leads_to in clicks.items():
        tab.follow(tab.page.get_by_role("link", name=click, exact=True).first, leads_to)
    sample = run.search(step=(step, step), is_eval=False, order="reward", limit=1)["samples"][0]
    shown = tab.page.locator("h1 + .key").inner_text()
    assert f"reward {sample['reward']:.4g}" in shown, shown
    return sample
