"""The trainer takes a workflow by its string, and the built-in agents train: weights change, dumps can be read."""

from __future__ import annotations

import pytest
import torch

from rollwright import GRPOConfig
from rollwright.config.sections import OptimizerConfig, PPOActorConfig
from rollwright.config.tasksets import DatasetConfig
from rollwright.errors import RollwrightError
from rollwright.trainers.loops.rl import PPOTrainer

pytestmark = pytest.mark.slow

TASKS = [
    {"messages": [{"role": "user", "content": f"{n}+1="}], "question": f"{n}+1=", "answer": str(n + 1), "query_id": str(n)}
    for n in range(8)
]


def count_digits(prompt, completion, prompt_ids, completion_ids, **data) -> float:
    return float(sum(character.isdigit() for character in completion))


@pytest.fixture
def config(tiny_model, tmp_path):
    config = GRPOConfig(
        experiment_name="named",
        total_train_steps=2,
        train_dataset=DatasetConfig(batch_size=2),
        actor=PPOActorConfig(path=str(tiny_model), optimizer=OptimizerConfig(lr=1e-3)),
    )
    config.gconfig = config.gconfig.new(n_samples=4, max_new_tokens=12)
    config.cluster.fileroot = str(tmp_path)
    config.stats_logger.display = "none"
    return config


@pytest.mark.parametrize(
    ("workflow", "kwargs", "shown"),
    [
        (
            "rollwright.workflows.multi_turn.MultiTurnWorkflow",
            {"reward_fn": count_digits, "max_turns": 3, "target_reward": 99, "feedback_message": "Once more."},
            "<|user|>Once more.<|end|><|assistant|>⟧",
        ),
        (
            "rollwright.workflows.search_agent.SearchAgentWorkflow",
            {"reward_fn": count_digits, "prompt_template": "{question}", "search_tool": None, "max_turns": 2},
            "",
        ),
        (
            "rollwright.workflows.tool_integrated.ToolIntegratedWorkflow",
            {"reward_fn": count_digits, "max_turns": 2},
            "",
        ),
    ],
)
def test_it_trains_by_its_string(config, tmp_path, workflow, kwargs, shown):
    with PPOTrainer(config, TASKS) as trainer:
        before = trainer.actor.full_weights()["model.embed_tokens.weight"].clone()
        result = trainer.train(workflow=workflow, workflow_kwargs=kwargs)
        after = trainer.actor.full_weights()["model.embed_tokens.weight"]
        assert trainer.actor.version == 2
    assert result["steps"] == 2
    assert not torch.equal(before, after)
    dump = next(tmp_path.glob("named/**/rollouts/step-000002.txt")).read_text()
    assert "sampled tokens of" in dump
    assert shown in dump


def test_a_group_made_by_the_workflow_trains(config):
    config.gconfig = config.gconfig.new(n_samples=1)
    kwargs = {"reward_fn": count_digits, "prompt_template": "{question}", "search_tool": None, "group_size": 4}
    with PPOTrainer(config, TASKS) as trainer:
        result = trainer.train(workflow="rollwright.workflows.search_agent.GroupedSearchAgentWorkflow", workflow_kwargs=kwargs)
        assert trainer.actor.version == 2
    assert result["steps"] == 2


def test_a_module_of_the_users_own(config, tmp_path, monkeypatch):
    (tmp_path / "my_episodes.py").write_text(
        "from rollwright import RLVRWorkflow\nclass Mine(RLVRWorkflow):\n    made = 0\n"
        "    async def arun_episode(self, engine, data):\n        Mine.made += 1\n"
        "        return await super().arun_episode(engine, data)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with PPOTrainer(config, TASKS) as trainer:
        trainer.train(workflow="my_episodes.Mine", workflow_kwargs={"reward_fn": count_digits})
    import my_episodes

    assert my_episodes.Mine.made == 2 * 2 * 4


def test_a_name_that_is_nowhere_is_an_error_that_lists_what_was_tried(config):
    with (
        PPOTrainer(config, TASKS) as trainer,
        pytest.raises(RollwrightError, match=r"(?s)Tried: module .*there is no module"),
    ):
        trainer.train(workflow="rollwright.workflows.multi_turns.MultiTurnWorkflow", workflow_kwargs={})
