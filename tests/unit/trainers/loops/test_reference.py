"""A reference policy that the config names is the one that KL is measured against."""

import copy

import torch

from rollwright import GRPOConfig
from rollwright.config.sections import TrainEngineConfig
from rollwright.trainers.loops.rl import PPOTrainer


def test_the_named_reference_is_loaded(tiny_model, tmp_path):
    config = GRPOConfig(experiment_name="reference", total_train_steps=1)
    config.actor.path = str(tiny_model)
    config.actor.kl_ctl = 0.1
    config.ref = TrainEngineConfig(path=str(tiny_model))
    config.train_dataset.batch_size = 1
    config.cluster.fileroot = str(tmp_path)
    tasks = [{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}]
    with PPOTrainer(config, copy.deepcopy(tasks)) as trainer:
        reference = trainer.actor.reference
        assert reference is not None
        assert reference.optimizer is None
        assert reference.model is not trainer.actor.model
        name = "model.embed_tokens.weight"
        assert torch.equal(reference.full_weights()[name], trainer.actor.full_weights()[name])
