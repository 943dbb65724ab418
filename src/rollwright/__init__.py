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

#: Public name -> the module that it is imported from.
_EXPORTS = {
    name: module
    for module, name in re.findall(
        r"^from (\S+) import (\w+)", Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"), re.MULTILINE
    )
}

__all__ = list(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        module = importlib.import_module(_EXPORTS[name])
        value = getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{_EXPORTS[name]}.{name}")
        return globals().setdefault(name, value)
    try:
        return importlib.import_module(f"rollwright.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"rollwright.{name}":
            raise
    raise AttributeError(f"module 'rollwright' has no name {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
