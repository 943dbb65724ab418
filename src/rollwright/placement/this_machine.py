"""The placement ``local``: a run trains in this process, or in ranks that torchrun's agent starts on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollwright.config.experiment import FinetuneSpec, PPOConfig, section_of
from rollwright.config.loading import Stage
from rollwright.config.sections import ClusterConfig
from rollwright.errors import ConfigError
from rollwright.placement.gpus import refuse_too_few_gpus
from rollwright.placement.local_rollout import make_rollout_engine
from rollwright.placement.rank_processes import open_ranks
from rollwright.placement.ranks import TrainRanks
from rollwright.placement.torchrun import start_ranks, started_processes
from rollwright.rollout.engines import RolloutEngine
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training import parallel
from rollwright.training.model import resolve_device


class ThisMachine:
    """See ``Placement``. With several processes, the trained model is sharded."""

    inputs_are_here = True
    runs_episodes_here = True
    reopens_after = ()

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster

    def check(self, config: Any) -> None:
        """Raise an error if a stage needs more GPUs than this machine has."""
        refuse_too_few_gpus(config)

    def show(self, stages: Sequence[Stage], words: Sequence[str]) -> list[str]:
        """Describe, where there are GPUs, what each of them would hold in each stage that samples and trains."""
        import torch

        if not (count := torch.cuda.device_count()):
            return []
        from rollwright.placement.memory_plan import described, plan_of, shape_of

        size, lines = torch.cuda.get_device_properties(0).total_memory, []
        for stage in stages:
            if stage.kind == "rl" and Path(stage.config.actor.path).exists():  # an earlier stage may still have to make it
                shape = shape_of(stage.config.actor.path)
                lines += [f"\nIn stage {stage.name}:", *described(plan_of(stage.config, shape, count, size), shape, size)]
        return lines

    def start(self, words: Sequence[str], run_directory: Path) -> int | None:
        """Start the ranks, unless there is only one or torchrun has started this process as one of them."""
        if self._cluster.processes == 1 or "RANK" in os.environ:
            return None
        return start_ranks(words, self._cluster.processes)

    def join(self, configs: Sequence[Any]) -> None:
        """Join the other ranks if torchrun started several; ``cluster.processes`` must be 1 or their number."""
        started = started_processes()
        for config in configs:
            wanted, mode = config.cluster.processes, getattr(config, "mode", "both")
            if started > 1 and mode not in ("both", "train"):
                raise ConfigError(f"mode {mode} is one process, but WORLD_SIZE is {started}: start it without torchrun.")
            if wanted not in (1, started):
                raise ConfigError(
                    f"cluster.processes is {wanted}, but {started} {'was' if started == 1 else 'were'} started: `rollwright run` starts "
                    f"them by itself, and torchrun needs --nproc-per-node {wanted}."
                )
        parallel.join_processes(resolve_device(section_of(configs[0]).device if configs else "cpu"))

    def ranks(self, config: Any, spec: FinetuneSpec, directory: RunDirectory, *, shares_weights: bool) -> TrainRanks:
        """On rank 0, load the model on all ranks."""
        return open_ranks(config, spec, directory, shares_weights=shares_weights)

    def serve_models(self, config: PPOConfig, ranks: TrainRanks, directory: RunDirectory, opened: ExitStack) -> PPOConfig:
        """Return the config unchanged: ``TaskServices`` starts the servers of auxiliary models when a workflow first needs them."""
        return config

    def rollout(self, config: PPOConfig, ranks: TrainRanks, tokenizer: Any, directory: RunDirectory) -> RolloutEngine:
        """Open an engine in this process, or a client of servers that already run or are started here."""
        return make_rollout_engine(config, ranks, tokenizer, directory)
