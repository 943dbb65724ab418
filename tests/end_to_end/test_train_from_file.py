"""Mode train on a file of experiences that were written elsewhere: trained in order, each once, until the file ends."""

from __future__ import annotations

import json

import pytest

from rollwright import GRPOConfig
from rollwright.config.modes import StoreConfig
from rollwright.config.sections import OptimizerConfig, PPOActorConfig
from rollwright.config.tasksets import DatasetConfig
from rollwright.errors import TrajectoryError
from rollwright.experience.experience import Experience, ExperienceId
from rollwright.store import FileStore
from rollwright.trainers.modes.shared_run import claim_part
from rollwright.trainers.modes.train_from_store import StoreTrainer

pytestmark = pytest.mark.slow


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
