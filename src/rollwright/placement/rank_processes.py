"""Opens the ranks that torchrun started to train one model.

Rank 0 owns the run: its directory, the order of the tasks, the engine that samples, and the reports. The other ranks load their shard of
the model, execute the calls that rank 0 sends (``rollwright.placement.ranks``), and end with rank 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rollwright.config.experiment import DPOConfig, FinetuneSpec, PPOConfig
from rollwright.config.loading import Stage
from rollwright.config.recipes import apply_recipe, uses_critic
from rollwright.inference.engine import WeightReceiver
from rollwright.placement.ranks import TrainRanks, ignore_signals, received, refuse_images, send
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training import parallel
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.engine import TrainEngine
from rollwright.training.preferences import PreferenceEngine
from rollwright.training.recovery_checkpoint import RecoverCheckpoints

#: Kinds of stages in which all ranks take part. Rank 0 runs all other stages alone.
TRAINS = ("sft", "dpo", "rl")


def training_configs(stages: Sequence[Stage]) -> list[Any]:
    """Return the configs of the stages in which all ranks take part."""
    return [stage.config for stage in stages if stage.kind in TRAINS]


def open_ranks(config: Any, spec: FinetuneSpec, directory: RunDirectory, *, shares_weights: bool) -> TrainRanks:
    """On rank 0, load the trained engine on all ranks.

    Args:
        config: the stage's config.
        spec: the stage's length.
        directory: the stage's directory.
        shares_weights: whether an engine in this process may compute with the trained tensors.
    """
    send({"spec": dataclasses.asdict(spec), "recover": str(directory.recover.absolute())})
    with parallel.watched():
        return load_ranks(config, spec, directory.recover, shares_weights)


def load_ranks(config: Any, spec: FinetuneSpec, recover: Path, shares_weights: bool = True) -> TrainRanks:
    """Load this rank's shard of the trained engine."""
    engine = _open_engine(config, spec, shares_weights)
    return TrainRanks(engine, RecoverCheckpoints(recover, keep=config.recover.keep, in_background=config.recover.in_background))


def _open_engine(config: Any, spec: FinetuneSpec, shares_weights: bool) -> TrainEngine:
    torch.manual_seed(config.seed)  # random initial weights are equal on every rank
    engine: TrainEngine
    if isinstance(config, PPOConfig):
        engine = FSDPPPOActor(apply_recipe(config).actor)
    else:
        engine = (PreferenceEngine if isinstance(config, DPOConfig) else TrainEngine)(config.model)
    engine.shares_weights = shares_weights
    engine.shares_gpu = isinstance(config, PPOConfig) and config.rollout.colocate
    reference = getattr(config, "ref", None)
    if reference is not None:  # otherwise the engine copies its initial weights if it needs a reference
        engine.load_reference(reference)
    engine.initialize(None, spec)
    if isinstance(config, PPOConfig) and isinstance(engine, FSDPPPOActor) and uses_critic(engine.config):
        engine.add_critic(config.critic_section, spec)
    refuse_images(engine)
    return engine


# -- on the other ranks ------------------------------------------------------------------------------------------------


def announce_stage(name: str | None) -> None:
    """On rank 0, announce the next stage to the other ranks, or the end of the run if ``name`` is None."""
    send({"stage": name})


def follow_stages(stages: Sequence[Stage], prepare: Any) -> None:
    """On the other ranks, take part in the stages that rank 0 announces, until the run has ended.

    Args:
        stages: the run's stages, equal on every rank.
        prepare: called with the config of each stage before it starts.
    """
    ignore_signals()
    configs = {stage.name: stage.config for stage in stages}
    while (name := received()["stage"]) is not None:
        prepare(configs[name])
        follow_config(configs[name])


def follow_config(config: Any) -> None:
    """On the other ranks, load this rank's shard of the model and execute the calls of rank 0."""
    ignore_signals()
    opening = received()
    with parallel.watched():
        ranks = load_ranks(config, FinetuneSpec(**opening["spec"]), Path(opening["recover"]))
    if isinstance(ranks.engine, FSDPPPOActor):
        ranks.engine.connect_engine(WeightReceiver())  # a stand-in for rank 0's engine; never called
    ranks.follow()
    ranks.recover.wait()
    ranks.engine.destroy()
