"""Tests with an argument ``case_name`` run for each case of ``families``: those of CI, or with ``--all-families`` every one."""

from __future__ import annotations

import pytest

from . import families


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_name" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-families")
        metafunc.parametrize("case_name", list(families.cases()) if every else families.QUICK)


@pytest.fixture
def made(case_name: str) -> families.Made:
    """The case's model, scaled until its regimes matter; a case that covers nothing is skipped with the reason."""
    try:
        return families.made(case_name)
    except families.NotCovered as reason:
        pytest.skip(f"not covered: {reason}")
