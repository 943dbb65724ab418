"""Typed errors, one for each boundary. A message says what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class RollwrightError(Exception):
    """Base of all errors that Rollwright raises on purpose."""


class ConfigError(RollwrightError):
    """A key, type, range or combination of settings is wrong."""

    @classmethod
    def of(cls, faults: Iterable[str]) -> ConfigError:
        """Make one error for one or several faults; each distinct fault is on a line of its own."""
        distinct = list(dict.fromkeys(faults))
        return cls(distinct[0] if len(distinct) == 1 else "\n  ".join([f"{len(distinct)} faults:", *distinct]))


class DataError(RollwrightError):
    """A dataset, a row or a taskset is unusable; the message names file and line."""


class TrajectoryError(RollwrightError):
    """A workflow's result violates the data contract; the message names workflow, task and key."""


class RewardError(RollwrightError):
    """A reward function raised, hung, crashed its worker or returned something that is not a number."""


class BrokenRewardError(RewardError):
    """A reward function fails in the same way for all inputs: the run stops, because further samples would fail too."""


class VerifierError(RewardError):
    """A task's tests gave no usable reward, so the sample counts as failed instead of as scored with 0."""


class SandboxError(RollwrightError):
    """What a model writes cannot be run, because the sandbox is missing, does not start or is gone."""


class LostToolError(RollwrightError):
    """What a tool works with, such as its server, cannot be reached or is gone: the sample counts as failed, and the model is not told."""


class RefusedFilesError(SandboxError):
    """Files are not copied into or out of a box, because of what the box's programs made of them; the box itself works."""


class EngineError(RollwrightError):
    """An inference engine rejected or failed a request."""


class PromptTooLongError(EngineError):
    """A prompt leaves no room for a single new token in the engine's context."""


class QueueFullError(EngineError):
    """The queue of an engine is full; a later request may succeed."""


class EngineStepError(EngineError):
    """A step of an engine failed for a reason that no single request caused."""


class RequestAborted(EngineError):
    """A request was aborted, its engine was closed, or its sample exceeded the time limit."""


class WeightUpdateError(EngineError):
    """Weights could not be published, or an engine does not compute with them."""


class WorkflowError(RollwrightError):
    """A workflow cannot be found, built or run; the message lists what was tried."""


class RolloutError(RollwrightError):
    """Too many samples failed, or rollout cannot continue; the message names the first cause."""


class DatasetEnded(RolloutError):
    """All tasks were used and no group is left to train."""


class TrainingError(RollwrightError):
    """Training cannot continue: non-finite losses, an invalid batch or a lost rank."""


class LostRankError(TrainingError):
    """Another training process has ended. On a Ray cluster, the run is resumed; elsewhere, that process's launcher reports the cause."""


class LostProcessError(RollwrightError):
    """A process on a cluster has ended, or its node is lost."""


class CheckpointError(RollwrightError):
    """A checkpoint or a run directory is missing, incomplete or belongs to another run."""


class ClusterError(RollwrightError):
    """The cluster's scheduler (Slurm) rejected or lost processes."""


class JournalError(RollwrightError):
    """The journal cannot be written or read."""


class ReplayError(RollwrightError):
    """An episode that runs again differs from the journal; the message names task, call and the first differing token."""


class StoreError(RollwrightError):
    """The experience store is missing, damaged or used by a run that does not own it."""
