"""Mode train on what a store holds: a file of experiences that were written elsewhere, and an explorer's groups of one."""

from __future__ import annotations

import json

import pytest

from rollwright import GRPOConfig, load_stages
from rollwright.config.modes import StoreConfig
from rollwright.config.sections import OptimizerConfig, PPOActorConfig
from rollwright.config.tasksets import DatasetConfig
from rollwright.errors import TrajectoryError
from rollwright.experience.experience import Experience, ExperienceId
from rollwright.store import FileStore
from rollwright.trainers.modes.shared_run import claim_part, open_run_store
from rollwright.trainers.modes.train_from_store import StoreTrainer
from rollwright.trainers.stages import run_config

pytestmark = pytest.mark.slow


EXPLORED = """
experiment_name: explored
cluster: {fileroot: ROOT, threads: 1}
actor: {path: MODEL, recipe: ppo, optimizer: {lr: 1.0e-3}}
critic: {optimizer: {lr: 1.0e-2}}
gconfig: {n_samples: 1, max_new_tokens: 6}
train_dataset: {path: arithmetic, batch_size: 3, kwargs: {digits: 1}}
workflow: rlvr
reward_fn: REWARD
rollout: {max_head_offpolicyness: 1}
total_train_steps: 2
store: {}
stats_logger: {display: none}
"""


def share_of_digits(prompt, completion, prompt_ids, completion_ids, **data):
    return sum(character.isdigit() for character in completion) / 6


def config_of(tiny_model, tmp_path) -> GRPOConfig:
    config = GRPOConfig(
        mode="train",
        experiment_name="file",
        total_train_steps=5,
        train_dataset=DatasetConfig(batch_size=2),
        actor=PPOActorConfig(path=str(tiny_model), optimizer=OptimizerConfig(lr=1e-3)),
        store=StoreConfig(type="file", url=str(tmp_path / "experiences.jsonl")),
    )
    config.cluster.fileroot = str(tmp_path / "runs")
    config.stats_logger.display = "none"
    return config


def write(config: GRPOConfig, groups: int, **fields) -> None:
    with FileStore(config.store.url) as store:
        for number in range(groups):
            samples = [
                Experience(
                    tokens=[5, 6, 7 + number, 8 + run],
                    prompt_length=2,
                    reward=float(run),
                    eid=ExperienceId(task=number, run=run),
                    **fields,
                )
                for run in range(2)
            ]
            store.append(samples, ordinal=number)


def test_a_file_is_trained_on_to_its_end(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path)
    write(config, 5, logprobs=[-4.0, -4.0], versions=[0, 0], temperature=1.0, truncated=False)
    with claim_part(config) as directory, StoreTrainer(config, directory) as trainer:
        result = trainer.train()
        assert result["steps"] == 2  # 5 groups are two batches of 2; the fifth waits
        assert trainer.actor.version == 2
        assert not (directory.path / "weights").exists()  # nobody samples
    lines = [json.loads(line) for line in directory.metrics_file.read_text().splitlines()]
    assert [line["samples"] for line in lines] == [4.0, 4.0]
    assert all(line["reward"] == 0.5 for line in lines)

    write(config, 6, logprobs=[-4.0, -4.0], versions=[0, 0], temperature=1.0, truncated=False)  # the sixth is new
    config.recover.mode = "resume"
    with claim_part(config) as directory, StoreTrainer(config, directory) as trainer:
        assert trainer.step == 2
        assert trainer.train()["steps"] == 3  # the fifth, which had waited, and the sixth


def test_experiences_without_log_probabilities_are_refused(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path)
    write(config, 2)
    with (
        claim_part(config) as directory,
        StoreTrainer(config, directory) as trainer,
        pytest.raises(TrajectoryError, match="logprobs"),
    ):
        trainer.train()


def test_groups_of_one_that_were_explored_train_with_a_critic(tiny_model, tmp_path):
    """The explorer samples both batches with the first weights; the trainer then draws them from the store."""
    text = EXPLORED.replace("REWARD", f"{__name__}:share_of_digits").replace("ROOT", str(tmp_path))
    (tmp_path / "explored.yaml").write_text(text.replace("MODEL", str(tiny_model)))
    for mode in ("explore", "train"):
        (stage,) = load_stages(tmp_path / "explored.yaml", [f"mode={mode}"])
        assert run_config([stage]) == 0
    trial = tmp_path / "explored" / "trial"
    with open_run_store(stage.config) as store:
        assert [len(group.experiences) for group in store.groups()] == [1] * 6
    steps = [json.loads(line) for line in (trial / "trainer" / "metrics.jsonl").read_text().splitlines()]
    assert [step["samples"] for step in steps] == [3.0, 3.0]
    assert [step["critic/optimizer_steps"] for step in steps] == [1.0, 1.0]
    assert steps[1]["critic/values/mean"] != 0
    assert all(step["actor/advantage/abs_mean"] > 0 for step in steps)  # that of a group baseline is 0 for groups of one
    assert (trial / "trainer" / "checkpoints" / "final" / "critic").is_dir()
