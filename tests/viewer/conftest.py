"""A real browser, a server over recorded runs, and a check of every page that nothing leaves the machine."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served_runs import serve
from written_runs import WrittenRun

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


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
    """A headless Chromium; it ends with the file that asked for it, as its driver holds an event loop that other tests need."""
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


class Watched:
    """A page of the browser, with what went wrong on it and what it asked of others than the viewer."""

    def __init__(self, page: Any, origin: str) -> None:
        self.page, self.origin = page, origin
        self.faults: list[str] = []
        self.foreign: list[str] = []
        page.on("console", lambda message: self.faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
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


@pytest.fixture
def watched(chromium, viewer) -> Iterator[Any]:
    """Makes a page that is closed at the end, where no fault and no foreign request may have come about."""
    made = []

    def make(width: int = 1280, scheme: str = "light", origin: str | None = None) -> Watched:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True)
        context.set_default_timeout(90_000)  # a busy machine is no fault
        made.append((context, Watched(context.new_page(), origin or viewer.url)))
        return made[-1][1]

    yield make
    for context, page in made:
        context.close()
        assert page.faults == []
        assert page.foreign == []
