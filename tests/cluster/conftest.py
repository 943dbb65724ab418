from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks_runs import run, trial, write_grpo
from ray_machine import start_ray

_clusters: list[Any] = []  # of Ray, that run


@pytest.fixture
def grpo(tmp_path, tiny_model):
    """Writes the config of a GRPO run; returns its directory."""
    return write_grpo(tmp_path, tiny_model)


@pytest.fixture(scope="session")
def alone(tmp_path_factory, tiny_model) -> Callable[[int], Path]:
    """Makes the ten steps of that run in one process, once for each seed; returns the run's directory."""

    @functools.cache
    def run_alone(seed: int) -> Path:
        directory = write_grpo(tmp_path_factory.mktemp("alone"), tiny_model)
        run(directory, "grpo.yaml", f"seed={seed}")
        return trial(directory, "trial")

    return run_alone


def _start_ray(first: int) -> Any:
    _clusters.append(start_ray(first))
    return _clusters[-1]


@pytest.fixture
def another_ray():
    """Starts another Ray, at 127.0.0.FIRST and the two addresses behind it."""
    return _start_ray


@pytest.fixture(scope="session")
def shared_ray():
    """A Ray that all tests of this directory share; it ends with them."""
    return _start_ray(2)


@pytest.fixture
def cluster(shared_ray):
    """The address of that Ray."""
    return shared_ray.address


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path.parent != item.path.parent:
        while _clusters:
            _clusters.pop().shutdown()
