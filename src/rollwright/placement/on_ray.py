"""The placement ``ray``: ranks, inference servers and workers are processes on a Ray cluster, controlled by this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollwright.config.experiment import FinetuneSpec, PPOConfig, SFTConfig
from rollwright.config.loading import Stage
from rollwright.config.sections import ClusterConfig
from rollwright.errors import ConfigError, LostRankError
from rollwright.placement import slurm_nodes
from rollwright.placement.capacity import demands_of, place
from rollwright.placement.rank_processes import TRAINS
from rollwright.placement.ray_cluster import RayCluster
from rollwright.placement.ray_ranks import RayRanks
from rollwright.placement.ray_rollout import make_ray_rollout, serve_auxiliary_models
from rollwright.placement.torchrun import started_processes
from rollwright.rollout.engines import RolloutEngine
from rollwright.tracking.run_directory import RunDirectory


class RayPlacement:
    """See ``Placement``."""

    inputs_are_here = True
    runs_episodes_here = False
    reopens_after = (LostRankError,)

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster

    def check(self, config: PPOConfig | SFTConfig) -> None:
        """Check that a stage fits on this machine, if the run would start Ray on it alone. An existing cluster is checked when the run starts."""
        cluster = self._cluster
        if not (cluster.address or os.environ.get("RAY_ADDRESS") or slurm_nodes.nodes() > 1 or slurm_nodes.resources()):
            self._fit(config)

    def show(self, stages: Sequence[Stage], words: Sequence[str]) -> list[str]:
        """List, for each training stage, the node that each process would fit on, given the cluster's current state."""
        lines = []
        for stage in stages:
            if stage.kind in TRAINS:
                lines += [f"On the cluster, in stage {stage.name}:", *self._fit(stage.config)]
        return lines

    def _fit(self, config: PPOConfig | SFTConfig) -> list[str]:
        nodes = RayCluster.look(self._cluster)
        demands = demands_of(config, any(node.gpus for node in nodes))
        needs = {demand.role: f"{demand.cpus:g} CPUs, {demand.gpus} GPUs" for demand in demands}
        fitting = place(demands, nodes, self._cluster.nodes)
        return [f"  {process} ({needs[process.split()[0]]}): {node}" for process, node in fitting]

    def start(self, words: Sequence[str], run_directory: Path) -> None:
        """Return None, because this process controls the run."""

    def join(self, configs: Sequence[Any]) -> None:
        """Raise an error if torchrun started this process, because Ray places the ranks."""
        if (started := started_processes()) > 1:
            raise ConfigError(
                f"cluster.kind is ray, which places the ranks, but WORLD_SIZE is {started}: start it without torchrun."
            )

    def ranks(self, config: Any, spec: FinetuneSpec, directory: RunDirectory, *, shares_weights: bool) -> RayRanks:
        """Place the ranks together, and load the model on them."""
        return RayRanks(config, spec, directory)

    def serve_models(self, config: PPOConfig, ranks: RayRanks, directory: RunDirectory, opened: ExitStack) -> PPOConfig:
        """Place a server for each auxiliary model that has none."""
        return serve_auxiliary_models(config, ranks, directory, opened)

    def rollout(self, config: PPOConfig, ranks: RayRanks, tokenizer: Any, directory: RunDirectory) -> RolloutEngine:
        """Place inference servers and workers."""
        return make_ray_rollout(config, ranks, tokenizer, directory)
