"""The documentation can be navigated: every page is in the index, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
]


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), f"{page.name} links to {link}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def _is_there(dotted: str) -> bool:
    """A module of the package, or a name in one."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        path = (ROOT / "src").joinpath(*parts[:end])
        for file in (path.with_suffix(".py"), path / "__init__.pyi", path / "__init__.py"):
            if file.exists():
                return end == len(parts) or re.search(rf"\b{parts[end]}\b", file.read_text(encoding="utf-8")) is not None
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_are_named_exist(page):
    named = set(re.findall(r"\brollwright(?:\.\w+)+", page.read_text(encoding="utf-8"))) - {"rollwright.schema.json"}
    assert [dotted for dotted in sorted(named) if not _is_there(dotted)] == []
