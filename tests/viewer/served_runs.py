"""A viewer that serves runs in this process, and the addresses of its views."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

RUN = "/run/sums~first"
VIEWS = {
    "runs": "/",
    "compare": "/compare?run=sums%2Ffirst&run=sums%2Fsecond",
    "run": RUN,
    "config": f"{RUN}/config",
    "steps": f"{RUN}/steps",
    "step": f"{RUN}/step/4",
    "group": f"{RUN}/group/10",
    "held-out": f"{RUN}/group/eval:2@v4",
    "sample": f"{RUN}/sample/10/1",
    "tokens": f"{RUN}/sample/10/1?view=tokens&overlay=advantage",
    "table": f"{RUN}/sample/10/1?view=table",
    "requests": f"{RUN}/sample/10/1?view=requests",
    "timeline": f"{RUN}/timeline",
    "weights": f"{RUN}/weights",
    "search": f"{RUN}/search?text=sum",
}


def serve(places: list[Path]) -> Any:
    """A viewer in this process, indexed; its ``url``, ``stop`` and ``pages``."""
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

    return SimpleNamespace(url=thread.url, stop=stop, pages=pages)
