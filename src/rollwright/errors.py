"""Typed errors, one for each boundary. A message says what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class RollwrightError(Exception):
    """Base of every error that Rollwright raises on purpose."""


class ConfigError(RollwrightError):
    """A key, type, range or combination of settings is wrong."""

    @classmethod
    def of(cls, faults: Iterable[str]) -> ConfigError:
        """One error for one or several faults; each is told once, on a line of its own."""
        distinct = list(dict.fromkeys(faults))
        return cls(distinct[0] if len(distinct) == 1 else "\n  ".join([f"{len(distinct)} faults:", *distinct]))


class DataError(RollwrightError):
    """A dataset, a row or a taskset is unusable; the message names file and line."""


class TrajectoryError(RollwrightError):
    """What a workflow returned breaks the data contract; the message names workflow, task and key."""


class RewardError(RollwrightError):
    """A reward function raised, hung, crashed its worker or returned something that is not a number."""


class BrokenRewardError(RewardError):
    """A reward function fails in the same way for all inputs: the run stops, because further samples would fail too."""


class SandboxError(RollwrightError):
    """Python that a model wrote cannot be run: the sandbox is not there, or does not start."""


class EngineError(RollwrightError):
    """An inference engine refused or failed a request."""


class PromptTooLongError(EngineError):
    """A prompt leaves no room for a single new token in the engine's context."""


class QueueFullError(EngineError):
    """An engine has no room for a request to wait; sent later, it may have."""


class EngineStepError(EngineError):
    """A step of an engine failed for a reason that no request of it can be blamed for."""


class RequestAborted(EngineError):
    """A request was ended by abort, by a closed engine or by its sample's time limit."""


class WeightUpdateError(EngineError):
    """Weights could not be published, or an engine does not compute what the trainer computes."""


class WorkflowError(RollwrightError):
    """A workflow cannot be found, built or run; the message lists what was tried."""


class RolloutError(RollwrightError):
    """Too many samples failed, or rollout cannot go on; the message names the first cause."""


class DatasetEnded(RolloutError):
    """The tasks have come to their end and no group is left to train."""


class TrainingError(RollwrightError):
    """The optimisation cannot go on: non-finite losses, a broken batch, a lost rank."""


class LostRankError(TrainingError):
    """Another process of the training has ended, and with it the run; that one, or whoever started it, says why."""


class LostProcessError(RollwrightError):
    """A process that was placed on a cluster has ended, or its node has."""


class CheckpointError(RollwrightError):
    """A checkpoint or a run directory is missing, incomplete or belongs to another run."""


class ClusterError(RollwrightError):
    """What places processes on machines (Slurm) refused them, or lost them."""


class JournalError(RollwrightError):
    """The journal cannot be written or read."""


class ReplayError(RollwrightError):
    """An episode that runs again does not do what the journal says; the message names task, call and the first differing token."""


class StoreError(RollwrightError):
    """The experience store is missing, damaged or used by a run that does not own it."""
