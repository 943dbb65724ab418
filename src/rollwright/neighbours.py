"""Modules beside a plugin file: ``import helper`` in ``worlds/a.py`` finds ``worlds/helper.py``.

``sys.path`` is not changed. When a plugin is loaded, its import statements are read. Names that match a file or package in its directory
are added to a finder at the end of ``sys.meta_path``, so the standard library and installed packages take precedence. A name that
would mean something else in another plugin's directory, or on ``sys.path``, is an error: Python has one module of a name.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

#: Start of the module names of plugin files.
PLUGIN_PREFIX = "rollwright_plugin_"


class Neighbours:
    """Finder of the modules beside plugin files, for ``sys.meta_path``."""

    def __init__(self) -> None:
        #: Module names, and the directory of each. Child processes get them.
        self.directories: dict[str, str] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module that an added plugin imports; others are left to the finders of Python."""
        directory = self.directories.get(name)
        return None if directory is None else PathFinder.find_spec(name, [directory])

    def adopt(self, directories: Mapping[str, str]) -> None:
        """Find the modules that another process has found in its ``directories``."""
        self.directories.update(directories)
        if self.directories and self not in sys.meta_path:
            sys.meta_path.append(self)

    def add(self, file: Path) -> None:
        """Find the modules beside a plugin file that it, or one of them, imports.

        Args:
            file: absolute path of the plugin, whose module is in ``sys.modules``.

        Raises:
            ImportError: such a module has the name of another one.
        """
        waiting, seen = [file], {file}
        while waiting:
            importer = waiting.pop()
            for name, line in _imported_names(importer):
                here = PathFinder.find_spec(name, [str(file.parent)])
                if here is None or _place(here) == importer or not self._takes(name, here, f"{importer}, line {line}"):
                    continue
                files = [found for found in _files(here) if found not in seen]
                seen.update(files)
                waiting += files

    def _takes(self, name: str, here: ModuleSpec, where: str) -> bool:
        """Return whether ``name`` is the module beside the plugin; False if Python or an installed package has one of this name."""
        other = _spec_of(name)
        if other is None or _place(other) == _place(here):
            self.adopt({name: str(_place(here).parent)})
            _use_loaded_plugin(name, _place(here))
            return True
        if _is_installed(other):
            return False
        raise ImportError(
            f"{where}: import {name} is ambiguous: {_place(here)} is beside the plugin, but the module {name!r} is {_place(other)}; "
            "rename one of them"
        )


#: The finder of this process.
NEIGHBOURS = Neighbours()


def _imported_names(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the top-level names of a file's absolute imports, in functions, too, with their lines; nothing if the file is no Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # the import itself reports it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        else:
            continue
        for name in names:
            yield name.partition(".")[0], node.lineno


def _spec_of(name: str) -> ModuleSpec | None:
    """Return the spec of the module of this name that is loaded, or would be."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    return importlib.util.find_spec(name)


def _place(spec: ModuleSpec) -> Path:
    """Return the file of a module, or the directory of a package."""
    for directory in spec.submodule_search_locations or ():
        return Path(directory).resolve()
    return Path(spec.origin or spec.name).resolve()


def _files(spec: ModuleSpec) -> list[Path]:
    """Return the Python files of a module or package."""
    place = _place(spec)
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def _is_installed(spec: ModuleSpec) -> bool:
    """Return whether a module belongs to Python or to an installed package."""
    return spec.name in sys.stdlib_module_names or any(
        part in ("site-packages", "dist-packages") for part in _place(spec).parts
    )


def _use_loaded_plugin(name: str, place: Path) -> None:
    """Make a file that was loaded as a plugin the module ``name``, too: loaded again, it would register its entries twice."""
    for known, module in list(sys.modules.items()):
        if known.startswith(PLUGIN_PREFIX) and getattr(module, "__file__", None) == str(place):
            sys.modules.setdefault(name, module)
