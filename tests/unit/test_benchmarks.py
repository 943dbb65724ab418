"""Benchmarks import what the package has. They are run by hand, so nothing else tells of a name that moved."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).resolve().parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_every_name_that_a_benchmark_imports_is_there(path):
    missing = [
        f"{node.module}.{each.name}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rollwright"
        for each in node.names
        if not _is_there(str(node.module), each.name)
    ]
    assert not missing


def _is_there(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True
