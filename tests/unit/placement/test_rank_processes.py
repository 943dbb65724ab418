"""Which processes a run needs before any of them begins."""

from __future__ import annotations

import pytest

from rollwright.config.loading import load_eval_stages, load_stages
from rollwright.errors import ConfigError
from rollwright.placement import rank_processes
from rollwright.placement.placement import placement_of_stages

CONFIG = """\
experiment_name: ranks
cluster: {processes: 2}
reward_fn: numeric_reward
workflow: rollwright.workflows.rlvr.RLVRWorkflow
train_dataset: {path: arithmetic, batch_size: 2}
valid_dataset: {path: arithmetic, split: valid}
actor: {path: model}
total_train_steps: 1
"""


def join(stages):
    placement_of_stages(stages).join(rank_processes.training_configs(stages))


def test_an_evaluation_is_one_process_whatever_trains(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    join(load_eval_stages(tmp_path / "run.yaml", ["path=model"]))
    with pytest.raises(ConfigError, match=r"cluster.processes is 2, but 1 was started"):
        join(load_stages(tmp_path / "run.yaml"))
