"""Weights on their way to explorers: a trainer that went back is not kept from publishing by what it left behind."""

import pytest
import torch

pytest.importorskip("sqlalchemy")

from rollwright.config.sections import TrainEngineConfig
from rollwright.experience.store import ExperienceStore
from rollwright.inference.weight_files import read_weights
from rollwright.trainers.published_weights import PublishedWeights
from rollwright.training.engine import TrainEngine


@pytest.fixture
def engine(tiny_model):
    made = TrainEngine(TrainEngineConfig(path=str(tiny_model), optimizer=None, device="cpu"))
    made.initialize()
    return made


def test_later_versions_of_a_trainer_that_is_gone_give_way(tmp_path, engine):
    weights = engine.full_weights()
    with ExperienceStore("sqlite://") as store:
        published = PublishedWeights(tmp_path, store, keep=2)
        store.commit("step-1", version=1)
        for version in range(1, 6):
            published.update_weights(None, version=version, weights=weights, trainer=engine)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["v000004", "v000005"]
        store.recover("step-1")
        again = PublishedWeights(tmp_path, store, keep=2)
        again.update_weights(None, version=1, weights=weights, trainer=engine)
        again.update_weights(None, version=2, weights=weights, trainer=engine)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001", "v000002"]
        read = dict(read_weights(store.latest_version().path))
    name = next(iter(read))
    assert torch.equal(read[name], weights[name])
