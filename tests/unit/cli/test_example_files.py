"""Every example loads, and the workflows, arguments and rewards that it names are there."""

import inspect
from pathlib import Path

import pytest

from rollwright import REWARD_FUNCTIONS, WORKFLOWS
from rollwright.config.loading import load_stages
from rollwright.trainers.checks.missing_inputs import refuse_missing_inputs
from rollwright.trainers.checks.unknown_names import refuse_unknown_names

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


def commands_in(text, example):
    """Overrides of every command that a text documents for an example."""
    lines = [line.split(f"run {example}", 1)[1] for line in text.splitlines() if f"run {example}" in line]
    return [[word for word in line.split(" #")[0].split() if "=" in word] for line in lines]


@pytest.mark.parametrize(
    ("place", "example"),
    [
        ("README.md", "gsm8k_grpo"),
        ("examples/gsm8k_grpo.yaml", "gsm8k_grpo"),
        ("examples/gsm8k_small.yaml", "gsm8k_small"),
        ("docs/laptop.md", "gsm8k_small"),
    ],
)
def test_the_documented_commands_of_the_gsm8k_examples_work_as_typed(place, example, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    rows = '{"question": "1+1?", "answer": "It is 2. #### 2"}\n' * 32
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(rows)
    commands = commands_in((REPOSITORY / place).read_text(), example)
    assert commands
    for overrides in commands:
        here = [each.replace(".path=t", f".path={tmp_path}/t") for each in overrides]  # its files are the reader's
        stages = load_stages(f"examples/{example}.yaml", here)
        refuse_unknown_names(stages)
        if any(".jsonl" in each for each in here):
            refuse_missing_inputs(load_stages(f"examples/{example}.yaml", [*here, f"actor.path={tiny_model}"]))
