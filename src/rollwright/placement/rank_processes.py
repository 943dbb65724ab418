"""The processes that train one model: what the first one opens, and what the others do meanwhile.

The first rank owns the run: its directory, the order of the tasks, the engine that samples, and what is reported. The others load
their part of the model, make the calls that the first one tells (``rollwright.placement.ranks``), and end with it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rollwright.config.experiment import DPOConfig, FinetuneSpec, PPOConfig
from rollwright.config.loading import Stage
from rollwright.config.recipes import apply_recipe
from rollwright.inference.engine import WeightReceiver
from rollwright.placement.ranks import TrainRanks, ignore_signals, refuse_images
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training import parallel
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.engine import TrainEngine
from rollwright.training.preferences import PreferenceEngine
from rollwright.training.recovery_checkpoint import RecoverCheckpoints

#: Kinds of stages that all ranks take part in; the first one alone carries the others out.
TRAINS = ("sft", "dpo", "rl")


def training_configs(stages: Sequence[Stage]) -> list[Any]:
    """The configs of the stages that all ranks take part in."""
    return [stage.config for stage in stages if stage.kind in TRAINS]


def open_ranks(config: Any, spec: FinetuneSpec, directory: RunDirectory, *, shares_weights: bool) -> TrainRanks:
    """On the first rank: load what is trained, on all ranks.

    Args:
        config: of the stage.
        spec: how long it is.
        directory: of the stage.
        shares_weights: an engine in this process may compute with the trained tensors.
    """
    if parallel.world_size() > 1:
        _tell({"spec": dataclasses.asdict(spec), "recover": str(directory.recover.absolute())})
    with parallel.watched():
        return load_ranks(config, spec, directory.recover, shares_weights)


def load_ranks(config: Any, spec: FinetuneSpec, recover: Path, shares_weights: bool = True) -> TrainRanks:
    """Load this rank's part of what is trained."""
    engine = _open_engine(config, spec, shares_weights)
    return TrainRanks(engine, RecoverCheckpoints(recover, keep=config.recover.keep, in_background=config.recover.in_background))


def _open_engine(config: Any, spec: FinetuneSpec, shares_weights: bool) -> TrainEngine:
    torch.manual_seed(config.seed)  # weights from scratch are the same on every rank
    engine: TrainEngine
    if isinstance(config, PPOConfig):
        engine = FSDPPPOActor(apply_recipe(config).actor)
    else:
        engine = (PreferenceEngine if isinstance(config, DPOConfig) else TrainEngine)(config.model)
    engine.shares_weights = shares_weights
    reference = getattr(config, "ref", None)
    if reference is not None:  # otherwise the engine keeps a copy of its first weights where it needs one
        engine.load_reference(reference)
    engine.initialize(None, spec)
    refuse_images(engine)
    return engine


# -- on the other ranks ------------------------------------------------------------------------------------------------


def tell_stage(name: str | None) -> None:
    """On the first rank: the others take part in a stage now; None: the run has ended."""
    if parallel.world_size() > 1:
        _tell({"stage": name})


def follow_stages(stages: Sequence[Stage], prepare: Any) -> None:
    """On the other ranks: take part in the stages that the first one tells, until the run has ended.

    Args:
        stages: of the run, the same on every rank.
        prepare: is called with the config of each before it begins.
    """
    ignore_signals()
    configs = {stage.name: stage.config for stage in stages}
    while (name := _told()["stage"]) is not None:
        prepare(configs[name])
        follow_config(configs[name])


def follow_config(config: Any) -> None:
    """On the other ranks: load this rank's part of the model, and make the calls that the first one tells."""
    ignore_signals()
    told = _told()
    with parallel.watched():
        ranks = load_ranks(config, FinetuneSpec(**told["spec"]), Path(told["recover"]))
    if isinstance(ranks.engine, FSDPPPOActor):
        ranks.engine.connect_engine(WeightReceiver())  # stands for the first rank's, and is never asked
    ranks.follow()
    ranks.recover.wait()
    ranks.engine.destroy()


def _tell(words: dict[str, Any]) -> None:
    with parallel.watched():
        parallel.broadcast(json.dumps(words).encode())


def _told() -> dict[str, Any]:
    with parallel.watched():
        return json.loads(parallel.broadcast(b""))
