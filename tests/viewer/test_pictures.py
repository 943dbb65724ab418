"""The pictures of README and docs: all are there, in light and dark, and the script that makes them takes a page at rest."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from pathlib import Path

import pytest
from written_runs import VIEWS

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def make_pictures():
    """``scripts/make_pictures.py`` as a module."""
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "scripts" / "make_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def shown_pictures() -> set[str]:
    """Names of the images that README and docs show."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return {name for page in pages for name in re.findall(r"images/([\w.-]+)", page.read_text(encoding="utf-8"))}


def test_every_picture_is_there_and_shown():
    assert shown_pictures() == {file.name for file in IMAGES.iterdir()}


def test_the_script_makes_pictures_in_both_schemes_for_pages_that_show_them(make_pictures):
    shown = shown_pictures()
    for name in make_pictures.PICTURES:
        assert f"{name}.png" in shown, f"{name} is shown nowhere"
        if f"{name}-dark.png" in shown:
            assert (IMAGES / f"{name}.png").stat().st_size < make_pictures.LARGEST
            assert (IMAGES / f"{name}-dark.png").stat().st_size < make_pictures.LARGEST
    assert f"{make_pictures.TERMINAL}.png" in shown


def test_a_page_is_taken_at_rest_in_light_and_dark(make_pictures, chromium, viewer):
    from PIL import Image

    whole = make_pictures.Picture("sums", lambda run: "", height=400)
    part = make_pictures.Picture("sums", lambda run: "", part=".charts .curve")
    for picture, view in ((whole, "group"), (part, "run")):
        taken = [
            Image.open(io.BytesIO(make_pictures.photograph(chromium, viewer.url + VIEWS[view], scheme, picture))).convert("L")
            for scheme in ("light", "dark")
        ]
        light, dark = (sum(each.histogram()[128:]) / (each.width * each.height) for each in taken)
        assert light > 0.8
        assert dark < 0.2
        if picture is whole:
            assert taken[0].size == (1920, 600)
    with pytest.raises(ValueError, match="answered 404"):
        make_pictures.photograph(chromium, f"{viewer.url}/run/none", "light", whole)


def test_a_telling_group_has_a_worst_sample_that_parts_from_better_ones(make_pictures, viewer):
    run = viewer.pages.runs.get("sums/first")
    key, worst = make_pictures.telling_group(run.path), make_pictures.telling_sample(run.path)
    rewards = [sample["reward"] for sample in run.group(key)["samples"] if sample["reward"] is not None]
    assert min(rewards) == run.sample(worst)["reward"] < max(rewards)
    assert run.sample(worst)["parts"] is not None
