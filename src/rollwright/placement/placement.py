"""Where the processes of a run are placed: on this machine, on a Ray cluster, or in a Slurm job. ``cluster.kind`` chooses once.

``rollwright run`` uses a placement to check whether a run fits (``check``), to describe it (``show``), and to start it in other processes
(``start``). A trainer gets from it the ranks that train (``ranks``) and the engine that samples (``rollout``).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from rollwright.config.experiment import FinetuneSpec, PPOConfig
from rollwright.config.loading import Stage
from rollwright.config.sections import ClusterConfig
from rollwright.errors import ConfigError, RollwrightError
from rollwright.experience.trajectory import Trajectory
from rollwright.rollout.engines import RolloutEngine
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training.recovery_checkpoint import RecoverCheckpoints

#: Import path of the class for each ``cluster.kind``; only the chosen one is imported, because Ray is optional.
PLACEMENTS = {
    "local": "rollwright.placement.this_machine:ThisMachine",
    "ray": "rollwright.placement.on_ray:RayPlacement",
    "slurm": "rollwright.placement.slurm:SlurmPlacement",
}


class Ranks(Protocol):
    """The processes that train one model, seen from the process that runs the loop.

    Attributes:
        engine: the trained engine, or this process's view of it.
        recover: the recovery checkpoints of the run.
    """

    engine: Any
    recover: RecoverCheckpoints

    @property
    def model(self) -> Any:
        """The whole model, which an engine in this process may share; None if no process can share it."""

    @property
    def awaits_proof(self) -> bool:
        """True if an inference engine that was started again waits for the call ``prove_publication``."""
        ...

    def prepare(self, batch: Trajectory) -> Trajectory:
        """Move a batch to the device where ``call`` expects it."""
        ...

    def call(
        self, name: str, batch: Trajectory | None = None, *, first_rank: dict[str, Any] | None = None, **arguments: Any
    ) -> Any:
        """Execute one of ``ranks.CALLS`` on all ranks and return the first rank's result.

        Args:
            name: name of the call.
            batch: divided over the ranks; the columns that the call computes are added to it.
            first_rank: arguments for rank 0 only; they override ``arguments`` of the same name.
            arguments: arguments for every rank; JSON values.
        """

    def with_weights(self, use: Callable[[Any], None], scratch: Path) -> None:
        """Call ``use`` in this process with the current weights.

        Args:
            use: called with a mapping of names to tensors.
            scratch: directory, visible to all ranks, for weights that cannot be passed in memory; removed afterwards.
        """

    def save(self, path: Any, tokenizer: Any = None) -> None:
        """Write the model in Hugging Face form."""

    def finish(self) -> None:
        """Release the other ranks after the last call."""


class Placement(Protocol):
    """Decides where the processes of a run are placed, and starts them there.

    Attributes:
        inputs_are_here: True if models and datasets are read on this machine.
        runs_episodes_here: True if episodes run in this process, so that a workflow may be an object.
        reopens_after: errors after which this process can close the trainer and reopen it, which resumes the run as after a kill.
    """

    inputs_are_here: bool
    runs_episodes_here: bool
    reopens_after: tuple[type[RollwrightError], ...]

    def __init__(self, cluster: ClusterConfig) -> None: ...

    def check(self, config: Any) -> None:
        """Check, before anything is loaded, that there is room for a training stage.

        Raises:
            ConfigError: there is none; the message says what is missing and what to set.
        """

    def show(self, stages: Sequence[Stage], words: Sequence[str]) -> list[str]:
        """Describe for a dry run where the processes would be placed.

        Args:
            stages: the stages of the run.
            words: arguments of the ``rollwright`` command.
        """
        ...

    def start(self, words: Sequence[str], run_directory: Path) -> int | None:
        """Run ``rollwright`` with these arguments in other processes and return the exit status.

        Returns None, without starting anything, if the caller should run the stages in this process.
        """

    def join(self, configs: Sequence[Any]) -> None:
        """Join the other processes of the training, if there are any.

        Args:
            configs: configs of the stages that train.

        Raises:
            ConfigError: a stage does not fit the processes that were started, or cannot run in this process.
        """

    def ranks(self, config: Any, spec: FinetuneSpec, directory: RunDirectory, *, shares_weights: bool) -> Ranks:
        """Load the model of a stage on all ranks.

        Args:
            config: the stage's config.
            spec: the stage's length.
            directory: the stage's directory.
            shares_weights: whether an engine in this process may compute with the trained tensors.
        """
        ...

    def serve_models(self, config: PPOConfig, ranks: Any, directory: RunDirectory, opened: ExitStack) -> PPOConfig:
        """Start those servers of auxiliary models that must run before the rollout starts; return the config with their addresses."""
        ...

    def rollout(self, config: PPOConfig, ranks: Any, tokenizer: Any, directory: RunDirectory) -> RolloutEngine:
        """Open the engine that the run samples from."""
        ...


def placement_of(cluster: ClusterConfig) -> Placement:
    """Return the placement that ``cluster.kind`` names."""
    return pkgutil.resolve_name(PLACEMENTS[cluster.kind])(cluster)


def placement_of_stages(stages: Sequence[Stage]) -> Placement:
    """Return the placement of a run, which all of its stages share.

    Raises:
        ConfigError: the stages have different placements.
    """
    first, *others = [stage.config.cluster for stage in stages if hasattr(stage.config, "cluster")] or [ClusterConfig()]
    for other in others:
        for name in ("kind", "processes", "slurm"):
            values = getattr(first, name), getattr(other, name)
            if values[0] != values[1]:
                raise ConfigError(
                    f"the stages of a run have {values[0]} and {values[1]} as cluster.{name}: set it once, at the top level."
                )
    return placement_of(first)
