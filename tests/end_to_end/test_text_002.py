"""The guide to adding a workflow: its code, with only the import lines changed, trains."""

from __future__ import annotations

import re

import pytest
import torch

from rollwright import GRPOConfig
from rollwright.config.sections import OptimizerConfig, PPOActorConfig
from rollwright.config.tasksets import DatasetConfig
from rollwright.trainers.loops.rl import PPOTrainer

pytestmark = pytest.mark.slow


def with_our_imports(code: str) -> str:
    """The rule of docs/coming-from.md: the whole module path becomes ``rollwright``."""
    return re.sub(r"from (areal|trinity)[\w.]* import", "from rollwright import", code)


def reindented(lines: list[str]) -> str:
    """The text lost its indentation: a class holds methods, a method holds the lines up to the next."""
    level, depth, code = 0, 0, []
    for line in lines:
        if depth == 0 and re.match(r"(async )?def ", line):
            level = 1
        code.append("    " * level + line)
        depth += sum(line.count(c) for c in "([{") - sum(line.count(c) for c in ")]}")
        if depth == 0 and line.endswith(":"):
            level += 1
    return "\n".join(code)


def code_of_the_text(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    start = lines.index("import uuid")
    end = next(i for i, line in enumerate(lines) if line.startswith("<!--"))
    return with_our_imports(reindented(lines[start:end]))


def count_digits(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data) -> float:
    return float(sum(character.isdigit() for character in completion))


def test_the_workflow_of_the_guide_trains_for_two_steps(shared, tiny_model, tmp_path):
    code = code_of_the_text(shared("seeds/002_aa30cba607b4c8fa.txt").read_text(encoding="utf-8"))
    namespace: dict = {"__name__": "guide"}
    exec(compile(code, "text 002", "exec"), namespace)
    config = GRPOConfig(
        experiment_name="guide",
        total_train_steps=2,
        train_dataset=DatasetConfig(batch_size=2),
        actor=PPOActorConfig(path=str(tiny_model), optimizer=OptimizerConfig(lr=1e-3)),
    )
    config.gconfig = config.gconfig.new(n_samples=4, max_new_tokens=16, temperature=0.7)
    config.cluster.fileroot = str(tmp_path)
    config.stats_logger.display = "none"
    tasks = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(8)]
    with PPOTrainer(config, tasks) as trainer:
        before = trainer.actor.full_weights()["model.embed_tokens.weight"].clone()
        kwargs = {"gconfig": config.gconfig, "tokenizer": trainer.tokenizer, "reward_fn": count_digits}
        result = trainer.train(workflow=namespace["MyWorkflow"], workflow_kwargs=kwargs)
        after = trainer.actor.full_weights()["model.embed_tokens.weight"]
        assert trainer.actor.version == 2
    assert result["steps"] == 2
    assert not torch.equal(before, after)
