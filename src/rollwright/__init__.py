"""Rollwright: reinforcement learning for language-model agents, where the unit is the workflow.

Every public name is importable from here and resolved on first use: ``import rollwright`` loads neither torch nor
transformers. The names and where they are defined are in ``__init__.pyi``, which type checkers read, too.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_TABLE = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
#: Public name -> the module that it is imported from, and its name there.
_EXPORTS = {name: (module, name) for module, name in re.findall(r"^from (\S+) import (\w+)", _TABLE, re.MULTILINE)}
_EXPORTS |= {second: _EXPORTS[name] for second, name in re.findall(r"^(\w+) = (\w+)", _TABLE, re.MULTILINE)}

__all__ = list(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        path, inside = _EXPORTS[name]
        module = importlib.import_module(path)
        value = getattr(module, inside) if hasattr(module, inside) else importlib.import_module(f"{path}.{inside}")
        return globals().setdefault(name, value)
    try:
        return importlib.import_module(f"rollwright.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"rollwright.{name}":
            raise
    if not name.startswith("_"):
        names = importlib.import_module("rollwright.compat.replacements")
        if advice := names.replacement(name):  # ``from rollwright import …`` would hide an AttributeError's message
            raise ImportError(f"rollwright has no {name}, {advice}.", name="rollwright")
    raise AttributeError(f"module 'rollwright' has no name {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
