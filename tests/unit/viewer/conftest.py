"""A run that is recorded once, and copies of it."""

from __future__ import annotations

import shutil

import pytest
from recorded import record_run


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory, tiny_model):
    """The directory of a run of three steps, see ``record_run``."""
    return record_run(tmp_path_factory.mktemp("recorded"), tiny_model)


@pytest.fixture
def copied_run(recorded_run, tmp_path):
    """A copy of it, as of another machine, without an index."""
    return shutil.copytree(recorded_run, tmp_path / "run", ignore=shutil.ignore_patterns("index.sqlite*"))
