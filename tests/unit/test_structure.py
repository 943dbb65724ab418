"""The shape of the source tree: imports, classes, and what has one place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "rollwright"


def _modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = ("rollwright", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules that a file imports: when it is loaded, when a function runs, or for type checkers."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in modules else node.module for name in names.values())
    return found & modules.keys()


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components with more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def connect(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                connect(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                circles.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(graph):
        if name not in index:
            connect(name)
    return circles


def test_no_files_import_each_other_in_a_circle():
    modules = _modules()
    graph = {name: _imports(path, modules) - {name, "rollwright"} for name, path in modules.items()}
    assert _circles(graph) == []


# -- classes ---------------------------------------------------------------------------------------------------------


def _classes() -> list[tuple[str, list[str], Path]]:
    """Name, names of the bases and file of every class of the package, those inside functions and classes too."""
    found = []
    for path in _modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                names = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in plain]
                found.append((node.name, names, path))
    return found


def _above(name: str, bases: dict[str, set[str]]) -> set[str]:
    """All of our classes that a class inherits from."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = (bases[waiting.pop()] & bases.keys()) - found - {name}
        found |= new
        waiting += new
    return found


def _deep_classes() -> dict[str, list[str]]:
    """Classes with more than four of ours above them, and which these are."""
    bases: dict[str, set[str]] = {}
    for name, above, _ in _classes():
        bases.setdefault(name, set()).update(above)
    return {name: sorted(_above(name, bases)) for name in bases if len(_above(name, bases)) > 4}


def _repeated_classes() -> dict[str, list[str]]:
    """Names of several classes, and their files."""
    places: dict[str, list[str]] = {}
    for name, _, path in _classes():
        places.setdefault(name, []).append(path.relative_to(SOURCE).as_posix())
    return {name: files for name, files in places.items() if len(files) > 1}


def test_no_class_has_more_than_four_of_ours_above_it():
    assert _deep_classes() == {}


def test_a_class_name_stands_once():
    assert _repeated_classes() == {}


# -- what has one place ----------------------------------------------------------------------------------------------

#: Libraries that draw for people, and markup; only these packages use them.
RENDERING = re.compile(
    r"^\s*(?:from|import) (?:rich|textual|jinja2|matplotlib|pygments)\b|[\"'][^\"']*<(?:svg|html|div|span|table|style)\b",
    re.MULTILINE,
)
RENDERS = ("viewer", "cli", "tracking")

#: Other systems, whose names only ``compat`` knows.
FOREIGN = re.compile(r"(?<![\w/])(?:areal|trinity|verl|trl)(?!\w)", re.IGNORECASE)


def _files_with(pattern: re.Pattern[str], packages: tuple[str, ...]) -> dict[str, str]:
    """First match of a pattern in each file outside of some packages."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        match = None if name.split("/")[0] in packages else pattern.search(path.read_text(encoding="utf-8"))
        if match:
            found[name] = match[0].strip()
    return found


def test_only_what_shows_things_renders():
    assert _files_with(RENDERING, RENDERS) == {}


def test_other_systems_are_named_in_compat_alone():
    assert _files_with(FOREIGN, ("compat",)) == {}


def test_tests_have_names_of_their_own():
    """Modules of tests are imported by their bare name, so two of one name could not run in one pytest."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
