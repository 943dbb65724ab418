"""The guide to parallel generation: its code blocks, with only imports and string paths changed, run and train.

Three things stand in the text for what a reader has: ``InferenceEngine(...)``, whose literal Ellipsis stands for an engine
(the test's namespace has one under that name), ``"path/to/tokenizer"``, and a comment that stands for further arguments
(``# ... other params``). Nothing else is changed.
"""

from __future__ import annotations

import asyncio
import re

import pytest
import torch

from rollwright import GRPOConfig
from rollwright.config.sections import OptimizerConfig, PPOActorConfig
from rollwright.config.tasksets import DatasetConfig
from rollwright.trainers.loops.rl import PPOTrainer

pytestmark = pytest.mark.slow

TEXT = "seeds/000_5d0187bb4ace552c.txt"


def with_our_names(code: str) -> str:
    """The rule of docs/coming-from.md: the whole module path becomes ``rollwright``; a string path names the file."""
    code = re.sub(r'"areal\.workflow\.(\w+)\.(\w+)"', r'"rollwright.workflows.\1.\2"', code)
    return re.sub(r"from areal[\w.]* import", "from rollwright import", code)


@pytest.fixture
def blocks(shared, tiny_model, tmp_path, monkeypatch):
    """Usage, integration, async reward, import paths: the text's four blocks of Python."""
    monkeypatch.chdir(tmp_path)  # the text dumps into ./rollout_dumps
    text = shared(TEXT).read_text(encoding="utf-8")
    found = [with_our_names(block) for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)]
    assert len(found) == 4
    return [block.replace("path/to/tokenizer", str(tiny_model)) for block in found]


def run_block(block: str, namespace: dict) -> None:
    """Run a block, whose top level may await, as a notebook does."""
    import ast

    compiled = compile(block, "text 000", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, namespace)  # noqa: S307 (the text's own code)
    if result is not None:
        asyncio.run(result)


def short(gconfig):
    """The text's arguments, for a model of random weights that ends nothing by itself."""
    return gconfig.new(max_new_tokens=24)


def test_the_blocks_run_one_after_the_other(blocks, tiny_model, tmp_path):
    from rollwright import BuiltinEngine, ParallelGenerationWorkflow

    usage, integration, asynchronous, imports = blocks
    namespace: dict = {"__name__": "guide", "asyncio": asyncio}
    run_block(usage, namespace)
    workflow = namespace["workflow"]
    assert isinstance(workflow, ParallelGenerationWorkflow)
    assert (workflow.max_goal_tokens, workflow.max_path_tokens, workflow.max_conclusion_tokens) == (2048, 4096, 2048)
    workflow.gconfig = short(workflow.gconfig)
    with BuiltinEngine(str(tiny_model), seed=1) as engine:
        # `from rollwright import InferenceEngine` runs as written; the call's Ellipsis gives the engine that stands for it.
        assert "engine = InferenceEngine(...)" in integration
        imported = {"ENGINE": engine, **namespace}
        run_block(integration.replace("InferenceEngine(...)", "ENGINE"), imported)
        trajectory = imported["trajectory"]
    keys = ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask")
    assert len({trajectory[key].shape for key in keys}) == 1
    assert bool(trajectory["attention_mask"].all())
    assert trajectory["rewards"].shape == (1,)
    (dump, *_) = (tmp_path / "rollout_dumps").glob("*/problem_001-*.txt")
    assert "path 1" in dump.read_text(encoding="utf-8")

    assert "# ... other params" in asynchronous
    others = "gconfig=workflow.gconfig, tokenizer=workflow.tokenizer,"
    run_block(asynchronous.replace("# ... other params", others), imported)
    assert imported["workflow"] is not workflow
    with BuiltinEngine(str(tiny_model), seed=1) as engine:
        again = asyncio.run(imported["workflow"].arun_episode(engine, imported["data"]))
    assert again["rewards"].tolist() == [0.0]

    run_block(imports, imported)
    assert imported["workflow_str"] == "rollwright.workflows.parallel_generation.ParallelGenerationWorkflow"


@pytest.mark.parametrize("branch_attention", ["plain", "isolated"])
def test_the_workflow_of_the_text_trains_by_its_string(blocks, tiny_model, tmp_path, branch_attention):
    usage, _, _, imports = blocks
    namespace: dict = {"__name__": "guide"}
    run_block(usage, namespace)
    run_block(imports, namespace)
    config = GRPOConfig(
        experiment_name="guide",
        total_train_steps=2,
        train_dataset=DatasetConfig(batch_size=2),
        actor=PPOActorConfig(path=str(tiny_model), optimizer=OptimizerConfig(lr=1e-3)),
    )
    config.gconfig = short(namespace["gconfig"]).new(n_samples=4)
    config.cluster.fileroot = str(tmp_path)
    config.stats_logger.display = "none"
    tasks = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(8)]
    kwargs = {"reward_fn": count_digits, "branch_attention": branch_attention}
    with PPOTrainer(config, tasks) as trainer:
        before = trainer.actor.full_weights()["model.embed_tokens.weight"].clone()
        result = trainer.train(workflow=namespace["workflow_str"], workflow_kwargs=kwargs)
        after = trainer.actor.full_weights()["model.embed_tokens.weight"]
        assert trainer.actor.version == 2
    assert result["steps"] == 2
    assert not torch.equal(before, after)


async def count_digits(prompt, completion, prompt_ids, completion_ids, **data):
    return float(sum(character.isdigit() for character in completion))
