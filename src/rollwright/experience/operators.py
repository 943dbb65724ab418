"""Operators process experiences between the workflow that made them and the trainer.

An operator gets all experiences of one task and returns those to keep::

    @OPERATORS.register("short_only")
    class ShortOnly(ExperienceOperator):
        def __init__(self, max_tokens: int = 512) -> None:
            self.max_tokens = max_tokens

        def process(self, experiences):
            kept = [experience for experience in experiences if len(experience) <= self.max_tokens]
            return kept, {}

Dropped experiences are counted under the operator's name. An operator that raises fails the run and never drops experiences silently.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from rollwright.config.modes import OperatorConfig
from rollwright.errors import ConfigError, TrajectoryError
from rollwright.experience.contract import Trajectory
from rollwright.experience.experience import Experience
from rollwright.experience.normaliser import normalise
from rollwright.registry import Registry
from rollwright.tracking.metrics import MetricsTracker, get_tracker


class ExperienceOperator(ABC):
    """One step of the pipeline."""

    @abstractmethod
    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """Filter or change the experiences of one task; ``experience.eid`` identifies the sample of each.

        Returns:
            The experiences to keep, and numbers for the run's metrics.
        """


#: The registered operators; ``store.operators`` lists the names to use.
OPERATORS: Registry[type[ExperienceOperator]] = Registry("operator", ConfigError, variable="OPERATORS")


@dataclass
class PipelineResult:
    """Result of a pipeline for one task's samples."""

    samples: list[list[Experience]]
    drops: dict[str, int] = field(default_factory=dict)  # number of dropped rows by operator
    metrics: dict[str, float] = field(default_factory=dict)  # "<operator>/<metric>"


class ExperiencePipeline:
    """Applies operators in order. Each is a name and its arguments, as in the config, or a pair ``(name, operator)``."""

    def __init__(self, operators: Sequence[OperatorConfig | tuple[str, ExperienceOperator]] = ()) -> None:
        self._steps: list[tuple[str, ExperienceOperator]] = [
            (item.name, OPERATORS.build(item.name, **item.args)) if isinstance(item, OperatorConfig) else item
            for item in operators
        ]

    def apply(self, samples: Sequence[Experience | Sequence[Experience]]) -> PipelineResult:
        """Run the samples of one task through all operators; ``eid.run`` becomes the index of each sample.

        Returns:
            The remaining experiences of each sample (without empty samples), the number of dropped experiences, and metrics, for
            ``ExperienceStore.tasks.finish(claim, result.samples, drops=result.drops)``.

        Raises:
            TrajectoryError: an operator failed; the message names it.
        """
        nested = [[item] if isinstance(item, Experience) else list(item) for item in samples]
        for index, sample in enumerate(nested):
            for experience in sample:
                experience.eid = replace(experience.eid, run=index)
        place = {str(experience.eid): index for index, sample in enumerate(nested) for experience in sample}
        result = PipelineResult([])
        current = [experience for sample in nested for experience in sample]
        for name, step in self._steps:
            if not current:
                break
            before = len(current)
            try:
                current, metrics = step.process(list(current))
            except Exception as error:  # raised by a user's operator
                raise TrajectoryError(
                    f"operator {name!r} failed on the experiences of group {current[0].eid.group!r}: {type(error).__name__}: {error}. "
                    "Correct it or take it out of store.operators."
                ) from error
            if len(current) < before:
                result.drops[name] = result.drops.get(name, 0) + before - len(current)
            result.metrics.update({f"{name}/{metric}": float(value) for metric, value in metrics.items()})
        rebuilt: dict[int, list[Experience]] = defaultdict(list)
        for position, experience in enumerate(current):  # an experience that an operator made is a sample of its own
            rebuilt[place.get(str(experience.eid), len(nested) + position)].append(experience)
        result.samples = [rebuilt[index] for index in sorted(rebuilt)]
        return result


# -- on groups in tensor form ----------------------------------------------------------------------------------------


def samples_of(group: Trajectory, task: int | str) -> list[list[Experience]]:
    """Return the experiences of each sample of one task's group, in order."""
    samples: dict[int, list[Experience]] = defaultdict(list)
    for experience, sample in zip(Experience.from_trajectory(group), group["sample_ids"].tolist(), strict=True):
        experience.eid.task = task
        samples[sample].append(experience)
    return list(samples.values())


def joined_samples(samples: Sequence[Sequence[Experience]], group_id: int, first_sample: int = 0) -> Trajectory:
    """Convert samples to a group in tensor form; samples are numbered from ``first_sample``.

    Raises:
        TrajectoryError: an experience has no reward, or a trained token has no log-probability or version.
    """
    rows = [experience for sample in samples for experience in sample]
    trajectory = normalise(rows, None, workflow="experiences", task=str(group_id))
    assert trajectory is not None
    places = [place for place, sample in enumerate(samples) for _ in sample]
    trajectory["sample_ids"] = torch.tensor(places, dtype=torch.int64) + first_sample
    trajectory["group_ids"] = torch.full((len(rows),), group_id, dtype=torch.int64)
    return trajectory


def report_operators(result: PipelineResult, tracker: MetricsTracker) -> None:
    """Add the metrics of operators, and the number of experiences that they dropped, as ``operators/…``."""
    scope = tracker.get("operators")
    scope.scalar(**result.metrics)
    scope.sum(**{f"dropped/{name}": count for name, count in result.drops.items()})


class GroupOperators:
    """Acceptance function that applies a run's operators in place to each complete group, and rejects the group if nothing is left.

    Rejected groups are replaced, so batches stay full. Metrics go to ``tracker``; None uses the run's tracker.
    """

    def __init__(self, operators: Sequence[OperatorConfig], tracker: MetricsTracker | None = None) -> None:
        self.pipeline = ExperiencePipeline(operators)
        self.tracker = tracker or get_tracker()

    def __call__(self, group: Trajectory) -> bool:
        """Apply the operators to one group. Returns False if nothing is left."""
        group_id, first_sample = int(group["group_ids"][0]), int(group["sample_ids"].min())
        result = self.pipeline.apply(samples_of(group, group_id))
        report_operators(result, self.tracker)
        if not result.samples:
            return False
        changed = joined_samples(result.samples, group_id, first_sample)
        group.clear()
        group.update(changed)
        return True


# -- the operators that come with Rollwright -------------------------------------------------------------------------


def rewards_of(experiences: Sequence[Experience]) -> list[float]:
    """Return the reward of each experience; raise ``TrajectoryError`` if an experience has none."""
    for experience in experiences:
        if experience.reward is None:
            raise TrajectoryError(f"experience {experience.eid} has no reward: set it in the workflow, before the pipeline.")
    return [float(experience.reward) for experience in experiences if experience.reward is not None]


def _groups(experiences: Sequence[Experience]) -> list[list[Experience]]:
    groups: dict[str, list[Experience]] = defaultdict(list)
    for experience in experiences:
        groups[experience.eid.group].append(experience)
    return list(groups.values())


def _compared(group: Sequence[Experience]) -> list[list[Experience]]:
    """Divide a group into experiences that are compared with each other, without those that are not trained."""
    parts: dict[Any, list[Experience]] = defaultdict(list)
    for experience in group:
        if experience.trainable is not False:
            parts[experience.environment, experience.role, experience.turn_ids].append(experience)
    return list(parts.values())


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


@OPERATORS.register("reward_filter")
class RewardFilter(ExperienceOperator):
    """Keeps experiences whose reward is between ``threshold`` and ``maximum``, both included; NaN is dropped."""

    def __init__(self, threshold: float = -math.inf, maximum: float = math.inf) -> None:
        if threshold > maximum:
            raise ConfigError(f"reward_filter: threshold {threshold} is above maximum {maximum}, so nothing would be kept.")
        self.threshold = threshold
        self.maximum = maximum

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        rewards = rewards_of(experiences)
        kept = [each for each, reward in zip(experiences, rewards, strict=True) if self.threshold <= reward <= self.maximum]
        return kept, {"kept_share": len(kept) / len(experiences)}


@OPERATORS.register("reward_std_filter")
@OPERATORS.register("no_variance_filter")
class NoVarianceFilter(ExperienceOperator):
    """Drops groups whose rewards are all (nearly) equal: their group-normalised advantages are zero.

    The rewards of each role, and of each turn if rows have ``turn_ids``, are compared separately: a group is dropped if none of them vary.
    ``threshold`` is the largest standard deviation of rewards at which a group is dropped.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        groups = _groups(experiences)
        varied = [group for group in groups if any(_deviation(rewards_of(part)) > self.threshold for part in _compared(group))]
        kept = [experience for group in varied for experience in group]
        return kept, {"dropped_groups_share": 1 - len(varied) / len(groups)}


@OPERATORS.register("reward_shaping_mapper")
@OPERATORS.register("reward_shaping")
class RewardShaping(ExperienceOperator):
    """Combines rewards with values of the experiences.

    Args:
        reward_shaping_configs: steps in order, each ``{"stats_key": …, "op_type": "ADD" | "SUB" | "MUL" | "DIV",
            "weight": 1.0}``: the reward is combined with ``weight · value``. The value is looked up in ``info`` and ``metrics``
            under ``stats_key``; ``response_length`` is always available.
    """

    _OPERATIONS: ClassVar[dict[str, Callable[[float, float], float]]] = {
        "ADD": operator.add,
        "SUB": operator.sub,
        "MUL": operator.mul,
        "DIV": operator.truediv,
    }

    def __init__(self, reward_shaping_configs: Sequence[Mapping[str, Any]]) -> None:
        self._steps = []
        for step in reward_shaping_configs:
            unknown = set(step) - {"stats_key", "op_type", "weight"}
            operation = str(step.get("op_type", "ADD")).upper()
            if unknown or "stats_key" not in step or operation not in self._OPERATIONS:
                raise ConfigError(
                    f"reward_shaping step {dict(step)} is not understood: it has a stats_key, an op_type out of "
                    f"{', '.join(self._OPERATIONS)}, and a weight."
                )
            self._steps.append((str(step["stats_key"]), self._OPERATIONS[operation], float(step.get("weight", 1.0))))

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        before = rewards_of(experiences)
        for experience, reward in zip(experiences, before, strict=True):
            known = {"response_length": float(experience.response_length), **experience.metrics, **experience.info}
            for key, operation, weight in self._steps:
                if key not in known:
                    raise TrajectoryError(
                        f"experience {experience.eid} has no {key!r} in its info or metrics (it has {', '.join(sorted(known))}): "
                        "the workflow sets it."
                    )
                try:
                    reward = operation(reward, weight * float(known[key]))
                except ZeroDivisionError:
                    raise TrajectoryError(
                        f"experience {experience.eid}: its reward is divided by {key!r}, which is 0."
                    ) from None
            experience.reward = reward
        change = [after - old for after, old in zip(rewards_of(experiences), before, strict=True)]
        return experiences, {
            "reward_diff/mean": math.fsum(change) / len(change),
            "reward_diff/min": min(change),
            "reward_diff/max": max(change),
        }


@OPERATORS.register("overlong_shaping")
class OverlongShaping(ExperienceOperator):
    """Reduces the reward of responses close to the length limit: DAPO's soft punishment (arXiv 2503.14476, eq. 13).

    Args:
        max_length: largest number of response tokens.
        buffer: number of tokens before the limit over which the penalty grows from 0 to ``penalty``.
        penalty: penalty at the limit and beyond.
    """

    def __init__(self, max_length: int, buffer: int, penalty: float = 1.0) -> None:
        if not 0 < buffer <= max_length:
            raise ConfigError(
                f"overlong_shaping: buffer is {buffer} and max_length {max_length}; it must be 0 < buffer <= max_length."
            )
        self.max_length = max_length
        self.buffer = buffer
        self.penalty = penalty

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        punished = 0
        for experience, reward in zip(experiences, rewards_of(experiences), strict=True):
            excess = experience.response_length - (self.max_length - self.buffer)
            if excess > 0:
                experience.reward = reward - self.penalty * min(1.0, excess / self.buffer)
                punished += 1
        return experiences, {"punished_share": punished / len(experiences)}


@OPERATORS.register("truncation_mask")
class TruncationMask(ExperienceOperator):
    """Excludes truncated experiences from training: clears their action mask or, if ``drop`` is True, drops them.

    A cleared experience still counts in its group's mean reward; a dropped one does not.
    """

    def __init__(self, drop: bool = False) -> None:
        self.drop = drop

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        for experience in experiences:
            if experience.truncated is None:
                raise TrajectoryError(
                    f"experience {experience.eid} does not say whether it was truncated: the engine's record does, or the workflow sets it."
                )
        truncated = [experience for experience in experiences if experience.truncated]
        share = {"truncated_share": len(truncated) / len(experiences)}
        if self.drop:
            return [experience for experience in experiences if not experience.truncated], share
        for experience in truncated:
            experience.action_mask = torch.zeros(experience.response_length, dtype=torch.bool)
        return experiences, share


@OPERATORS.register("pass_rate_calculator")
@OPERATORS.register("pass_rate")
class PassRate(ExperienceOperator):
    """Stores a task's pass rate, the share of its samples that pass, in ``info["pass_rate"]``; drops tasks that are too hard or too easy.

    Args:
        threshold: lowest reward with which a sample passes; for a sample of several rows, the mean reward counts.
        minimum: tasks with a lower pass rate are dropped.
        maximum: tasks with a higher pass rate are dropped.
    """

    def __init__(self, threshold: float = 1.0, minimum: float = 0.0, maximum: float = 1.0) -> None:
        if not 0.0 <= minimum <= maximum <= 1.0:
            raise ConfigError(
                f"pass_rate: minimum is {minimum} and maximum {maximum}; it must be 0 <= minimum <= maximum <= 1."
            )
        self.threshold = threshold
        self.minimum = minimum
        self.maximum = maximum

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        kept: list[Experience] = []
        rates = []
        for group in _groups(experiences):
            samples: dict[str, list[float]] = defaultdict(list)
            for experience, reward in zip(group, rewards_of(group), strict=True):
                samples[experience.eid.sample].append(reward)
            passed = [math.fsum(rewards) / len(rewards) >= self.threshold for rewards in samples.values()]
            rate = sum(passed) / len(passed)
            rates.append(rate)
            for experience in group:
                experience.info["pass_rate"] = rate
            if self.minimum <= rate <= self.maximum:
                kept += group
        return kept, {"mean": math.fsum(rates) / len(rates)}
