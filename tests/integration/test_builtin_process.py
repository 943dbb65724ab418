"""Generation in a process of its own: training goes on beside it, and both compute the same."""

from __future__ import annotations

import psutil
import pytest
from real_servers import write_model

from rollwright import PPOTrainer
from rollwright.config.experiment import PPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import ClusterConfig, DatasetConfig, NormConfig, OptimizerConfig, PPOActorConfig, RolloutConfig

pytestmark = pytest.mark.slow


def reward(prompt, completion, prompt_ids, completion_ids, **data) -> float:
    return float(len(set(completion_ids)))


@pytest.mark.parametrize("init_from_scratch", [False, True])
def test_a_run_trains_with_generation_in_a_process_of_its_own(tmp_path, init_from_scratch):
    model = write_model(tmp_path / "model")
    config = PPOConfig(
        experiment_name="apart",
        actor=PPOActorConfig(
            path=str(model),
            init_from_scratch=init_from_scratch,
            optimizer=OptimizerConfig(lr=1e-3),
            adv_norm=NormConfig(mean_level="batch", std_level="batch"),
        ),
        rollout=RolloutConfig(backend="builtin_process", max_head_offpolicyness=1, setup_timeout=120),
        train_dataset=DatasetConfig(batch_size=4),
        gconfig=GenerationHyperparameters(n_samples=2, max_new_tokens=12, temperature=0.7),
        total_train_steps=3,
        cluster=ClusterConfig(fileroot=str(tmp_path / "runs")),
    )
    rows = [{"messages": [{"role": "user", "content": f"task {index}"}], "answer": "x"} for index in range(16)]
    with PPOTrainer(config, rows) as trainer:
        client = trainer.rollout.client
        assert client.agreements[0].mean < 1e-4  # compared before the first token
        children = psutil.Process().children(recursive=True)
        children = [child for child in children if "serve-model" in child.cmdline()]  # others score rewards
        assert len(children) == 2  # the server and its supervisor
        summary = trainer.train("rollwright.workflows.rlvr.RLVRWorkflow", {"reward_fn": reward})
        assert summary["steps"] == 3
        assert client.get_version() == 3
        assert client.agreements[0].mean < 1e-3
        log = trainer.directory.logs / "builtin_process-0.log"
        assert log.exists()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
