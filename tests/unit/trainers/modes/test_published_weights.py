"""Weights on their way to explorers: a trainer that went back is not kept from publishing by what it left behind."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sqlalchemy")

from rollwright.config.sections import RolloutConfig, TrainEngineConfig
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import WeightUpdateError
from rollwright.inference.weights.files import read_weights
from rollwright.rollout.engines import LocalRolloutEngine
from rollwright.store import Announcement, ExperienceStore
from rollwright.trainers.modes import published_weights
from rollwright.trainers.modes.published_weights import (
    PublishedWeights,
    WeightFollower,
    load_and_audit,
    newest_weights,
    read_published,
)
from rollwright.training.engine import TrainEngine


@pytest.fixture
def engine(tiny_model):
    made = TrainEngine(TrainEngineConfig(path=str(tiny_model), optimizer=None, device="cpu"))
    made.initialize()
    return made


def test_later_versions_of_a_trainer_that_is_gone_give_way(tmp_path, engine):
    weights = engine.full_weights()
    with ExperienceStore("sqlite://") as store:
        published = PublishedWeights(tmp_path, store.announcements, keep=2)
        store.commit("step-1", version=1)
        for version in range(1, 6):
            published.update_weights(None, version=version, weights=weights, config=engine.model.config)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["v000004", "v000005"]
        store.recover("step-1")
        again = PublishedWeights(tmp_path, store.announcements, keep=2)
        again.update_weights(None, version=1, weights=weights, config=engine.model.config)
        again.update_weights(None, version=2, weights=weights, config=engine.model.config)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001", "v000002"]
        read = dict(read_weights(store.announcements.newest().path))
    name = next(iter(read))
    assert torch.equal(read[name], weights[name])


@pytest.fixture
def announced(tmp_path, engine):
    """Weights as version 3, other than the model's."""
    weights = {name: value * 1.25 for name, value in engine.full_weights().items()}
    with ExperienceStore("sqlite://") as store:
        store.recover(None)
        PublishedWeights(tmp_path, store.announcements).update_weights(
            None, version=3, weights=weights, config=engine.model.config
        )
        yield store.announcements.newest()


def test_an_explorer_takes_what_the_trainer_wrote_and_nothing_else(announced):
    read = read_published(announced)
    (file,) = Path(announced.path).glob("*.safetensors")
    bytes_ = bytearray(file.read_bytes())
    bytes_[-5] ^= 1
    file.write_bytes(bytes_)
    with pytest.raises(WeightUpdateError, match="damaged or changed"):
        read_published(announced)
    with pytest.raises(WeightUpdateError, match="holds version 3, not 4"):
        read_published(Announcement(4, announced.path, announced.epoch))
    assert {name for name, _ in read} == {name for name, _ in read_weights(announced.path)}


def test_an_engine_that_is_given_weights_is_seen_to_compute_with_them(announced, tiny_model, monkeypatch):
    weights = read_published(announced)
    with LocalRolloutEngine(RolloutConfig(), model=str(tiny_model), tokenizer=load_tokenizer(str(tiny_model))) as rollout:
        load_and_audit(rollout, weights, 3, None)
        assert rollout.get_version() == 3
        half = {name: value * 0.5 for name, value in weights}
        monkeypatch.setattr(published_weights, "_plain_logprobs", of_the_model_with(half, tiny_model))
        with pytest.raises(WeightUpdateError, match="does not compute with the published weights"):
            load_and_audit(rollout, weights, 4, None)


def of_the_model_with(weights, tiny_model):
    """Log-probabilities as they would be if the engine held other weights than its model."""
    other = TrainEngine(TrainEngineConfig(path=str(tiny_model), optimizer=None, device="cpu"))
    other.initialize()
    other.model.load_state_dict(weights, strict=False)
    plain = published_weights._plain_logprobs
    return lambda model, answer: plain(other.model, answer)


def test_weights_that_are_being_replaced_are_looked_for_again(announced, tmp_path, monkeypatch):
    """A trainer that began again writes the version that it is at anew: for a moment there is none."""
    path, away = Path(announced.path), tmp_path / "away"
    path.rename(away)
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            away.rename(path)

    monkeypatch.setattr(published_weights, "time", SimpleNamespace(sleep=pause))
    with ExperienceStore("sqlite://") as store:
        store.recover(None)
        assert newest_weights(store.announcements, None) is None
        store.announcements.publish(announced.path, 3)
        newest, weights = newest_weights(store.announcements, None)
        assert (newest.version, pauses) == (3, [0.1, 0.2])
        assert newest_weights(store.announcements, newest) is None
        path.rename(away)
        with pytest.raises(WeightUpdateError, match=r"no \*\.safetensors"):
            newest_weights(store.announcements, None)
    assert weights


def test_an_engine_follows_the_trainer_also_back_to_an_earlier_version(tmp_path, engine, tiny_model):
    weights, went_back = engine.full_weights(), []
    tokenizer = load_tokenizer(str(tiny_model))
    with (
        ExperienceStore("sqlite://") as store,
        LocalRolloutEngine(RolloutConfig(), model=str(tiny_model), tokenizer=tokenizer) as rollout,
    ):
        store.recover(None)
        published = PublishedWeights(tmp_path, store.announcements)
        follower = WeightFollower(rollout, store.announcements, None, lambda: went_back.append(rollout.get_version()))
        assert not follower.follow()
        for version in (1, 2):
            published.update_weights(None, version=version, weights=weights, config=engine.model.config)
            assert follower.follow()
            assert (follower.version, rollout.get_version(), went_back) == (version, version, [])
        assert not follower.follow()
        store.recover(None)
        published.update_weights(None, version=1, weights=weights, config=engine.model.config)
        assert follower.follow()
        assert (follower.version, rollout.get_version(), went_back) == (1, 1, [2])
