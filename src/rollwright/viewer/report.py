"""`rollwright view RUN --export FILE`: writes one HTML file with a run's curves and selected samples; it needs no server and no network."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rollwright.atomic import write_text
from rollwright.errors import ConfigError
from rollwright.viewer import sample_view
from rollwright.viewer.pages import Pages
from rollwright.viewer.run import Run
from rollwright.viewer.run_pages import overview
from rollwright.viewer.transcript import transcript
from rollwright.viewer.words import title_of

#: Longest time to bring the index up to date.
_INDEX_SECONDS = 600.0
_SCRIPTS = ("viewer.js", "uPlot.iife.min.js", "charts.js", "chart_bar.js", "chart_files.js")
_STYLES = ("uPlot.min.css", "viewer.css")


def write_report(places: Sequence[str | Path], file: Path, samples: int = 40) -> Path:
    """Write the report of one run and return its path.

    Args:
        places: directories to search; they must contain exactly one run.
        file: path of the HTML file, which is written atomically.
        samples: number of samples, half with the highest and half with the lowest reward.

    Raises:
        ConfigError: no run, or more than one, was found.
    """
    pages = Pages(places)
    entries = pages.entries()
    if len(entries) != 1:
        named = ", ".join(entry["path"] for entry in entries[:6]) or "none"
        raise ConfigError(f"a report is of one run, and there are {len(entries)}: name one of {named}.")
    run = pages.runs.get(entries[0]["id"])
    with contextlib.closing(pages.runs):
        run.refresh(_INDEX_SECONDS)
        entry = {**entries[0], "missing": [each["message"] for each in run.missing()]}
        scripts = "\n".join(pages.static[name].decode() for name in _SCRIPTS)
        styles = "\n".join(pages.static[name].decode() for name in _STYLES)
        html = pages.render(
            "report.html",
            title=entry["name"],
            run=entry,
            written=time.time(),
            policy=f"default-src 'none'; script-src {_hash(scripts)}; style-src {_hash(styles)}; img-src data:; base-uri 'none'; "
            "form-action 'none'",
            scripts=_markup(scripts),
            styles=_markup(styles),
            config=sorted(run.config.items()),
            chosen=[_shown(run.sample(key)) for key in _chosen(run, samples)],
            **overview(run, entry),
        )
    return write_text(file, html.encode("utf-8", "replace").decode())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _markup(text: str) -> Any:
    """Mark the viewer's own files as safe to include unchanged."""
    assert "</script" not in text.lower()
    assert "</style" not in text.lower()
    return Markup(text)  # no part of it comes from a run


def _chosen(run: Run, limit: int) -> list[str]:
    """Return the keys of the samples with the highest reward, then of those with the lowest."""
    best = run.search(status="accepted", order="-reward", limit=(limit + 1) // 2)["samples"]
    worst = run.search(status="accepted", order="reward", limit=limit // 2)["samples"]
    return list(dict.fromkeys(sample["key"] for sample in [*best, *reversed(worst)]))


def _shown(sample: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {
            **sample_view.tokens(row, "trained"),
            "number": number,
            "count": len(sample["rows"]),
            "links": [],
            "overlays": [],
            "more": None,
            "parts": None,
        }
        for number, row in enumerate(sample["rows"])
    ]
    return {
        **sample,
        "title": f"{title_of(sample['words'], sample['group'])}, sample {sample['index']}",
        "chat": transcript(sample),
        "facts": sample_view.facts(sample),
        "shown_rows": rows,
    }
