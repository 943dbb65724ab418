"""Every example loads, and the workflows, arguments and rewards that it names are there."""

import inspect
from pathlib import Path

import pytest

from rollwright import REWARD_FUNCTIONS, WORKFLOWS
from rollwright.config.loading import load_stages

REPOSITORY = Path(__file__).resolve().parents[3]
#: The notebook's config names no workflow: its cells build one.
EXAMPLES = sorted({*(REPOSITORY / "examples").rglob("*.yaml")} - {REPOSITORY / "examples/search-agent/local_1.5b_example.yaml"})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_what_it_names_is_there(example, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    for stage in load_stages(example):
        if name := getattr(stage.config, "workflow", None):
            inspect.signature(WORKFLOWS.get(name)).bind_partial(**stage.config.workflow_kwargs)
        if (name := getattr(stage.config, "reward_fn", None)) and isinstance(name, str):
            assert callable(REWARD_FUNCTIONS.get(name))
