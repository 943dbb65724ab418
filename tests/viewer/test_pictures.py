"""The pictures of docs/viewer.md. ``pytest tests/viewer/test_pictures.py --write-pictures`` makes them anew."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from written_runs import VIEWS

IMAGES = Path(__file__).parents[2] / "docs" / "images"


@pytest.mark.parametrize("name", ["run", "step", "group", "tokens"])
def test_the_pictures_of_the_docs_can_be_made(watched, name, request):
    from PIL import Image

    tab = watched(1280, "light")
    tab.visit(VIEWS[name])
    picture = Image.open(io.BytesIO(tab.page.screenshot())).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    assert picture.size == (1280, 900)
    file = IMAGES / f"viewer-{name}.png"
    if request.config.getoption("--write-pictures"):
        picture.save(file, optimize=True)
    assert file.exists(), "pytest tests/viewer/test_pictures.py --write-pictures makes it"
