"""Pipeline operators on groups in tensor form: what stands between rollout and the trainer, in whichever process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollwright.config.modes import OperatorConfig
from rollwright.experience.experience import Experience
from rollwright.experience.normaliser import normalise
from rollwright.experience.operators import ExperiencePipeline, PipelineResult
from rollwright.experience.trajectory import Trajectory
from rollwright.tracking.metrics import MetricsTracker, get_tracker


def samples_of(group: Trajectory, task: int | str) -> list[list[Experience]]:
    """The experiences of each sample of one task's group, in the order in which the samples stand."""
    samples: dict[int, list[Experience]] = {}
    for experience, sample in zip(Experience.from_trajectory(group), group["sample_ids"].tolist(), strict=True):
        experience.eid.task = task
        samples.setdefault(sample, []).append(experience)
    return list(samples.values())


def joined_samples(samples: Sequence[Sequence[Experience]], group_id: int, first_sample: int = 0) -> Trajectory:
    """A group in tensor form; its samples are numbered from ``first_sample``.

    Raises:
        TrajectoryError: an experience has no reward, or a trained token neither log-probability nor version.
    """
    rows = [experience for sample in samples for experience in sample]
    trajectory = normalise(rows, None, workflow="experiences", task=str(group_id))
    assert trajectory is not None
    places = [place for place, sample in enumerate(samples) for _ in sample]
    trajectory["sample_ids"] = torch.tensor(places, dtype=torch.int64) + first_sample
    trajectory["group_ids"] = torch.full((len(rows),), group_id, dtype=torch.int64)
    return trajectory


def report_operators(result: PipelineResult, tracker: MetricsTracker) -> None:
    """Add what operators said and dropped to the metrics, as ``operators/…``."""
    scope = tracker.get("operators")
    scope.scalar(**result.metrics)
    scope.sum(**{f"dropped/{name}": count for name, count in result.drops.items()})


class GroupOperators:
    """The operators of a run as an acceptance function: a complete group is changed in place, or refused where nothing is left.

    Refused groups are replaced by others, so a batch stays full.

    Args:
        operators: from the config.
        tracker: where the operators' numbers and what they dropped are reported; None: the run's.
    """

    def __init__(self, operators: Sequence[OperatorConfig], tracker: MetricsTracker | None = None) -> None:
        self.pipeline = ExperiencePipeline(operators)
        self.tracker = tracker or get_tracker()

    def __call__(self, group: Trajectory) -> bool:
        """Apply the operators to one group; false where they left nothing."""
        group_id, first_sample = int(group["group_ids"][0]), int(group["sample_ids"].min())
        result = self.pipeline.apply(samples_of(group, group_id))
        report_operators(result, self.tracker)
        if not result.samples:
            return False
        changed = joined_samples(result.samples, group_id, first_sample)
        group.clear()
        group.update(changed)
        return True
