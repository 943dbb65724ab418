"""Hooks of the documentation site (``mkdocs.yml``): what it shows is written elsewhere, once.

The navigation is ``docs/index.md``. README, CONTRIBUTING, SECURITY and CHANGELOG are pages of it. The API reference lists the
names of ``src/rollwright/__init__.pyi``, a page for each package, from their docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
#: Files above ``docs/`` that pages link to -> where the site has them.
MOVED = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/search_agent.ipynb": "examples/search_agent.ipynb",
    "examples/own_loop.py": "examples/own_loop.py",
}
API = "api"


def on_config(config: Any) -> Any:
    """The navigation: the sections and pages of ``docs/index.md``, then the API."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    nav: list[dict[str, Any]] = [{"Documentation": "index.md"}]
    for section in index.split("\n## ")[1:]:
        name, _, body = section.partition("\n")
        pages = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\)", body, flags=re.MULTILINE)
        nav.append({name: [{title: MOVED.get(path.removeprefix("../"), path)} for title, path in pages]})
    nav[-1][next(iter(nav[-1]))].append({"API": [f"{API}/{package}.md" for package in _public_names()]})
    config["nav"] = nav
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside ``docs/``, and the API's."""
    for source, target in MOVED.items():
        if source.endswith(".md"):
            text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](").replace('"docs/', '"')
            files.append(File.generated(config, target, content=_links(text)))
        else:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for package, names in _public_names().items():
        entries = "".join(f"::: {module}.{name}\n\n" for module, name in names)
        files.append(File.generated(config, f"{API}/{package}.md", content=f"# rollwright.{package}\n\n{entries}"))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links above ``docs/`` to where the site has the file."""
    return _links(markdown.replace("](../", "]("))


def _links(markdown: str) -> str:
    for source, target in MOVED.items():
        markdown = re.sub(rf"\]\({re.escape(source)}(?=[)#])", f"]({target}", markdown)
    return markdown


def _public_names() -> dict[str, list[tuple[str, str]]]:
    """Package -> (module, name) of what ``rollwright`` exports from it."""
    table = (ROOT / "src" / "rollwright" / "__init__.pyi").read_text(encoding="utf-8")
    packages: dict[str, list[tuple[str, str]]] = {}
    for module, name in re.findall(r"^from (rollwright[\w.]*) import (\w+) as ", table, flags=re.MULTILINE):
        packages.setdefault(module.split(".")[1], []).append((module, name))
    return packages
