"""Pipeline operators: what experiences pass between the explorer that made them and the trainer.

An operator takes experiences, all those of one task together, and returns the ones that go on::

    @OPERATORS.register_module("short_only")
    class ShortOnly(ExperienceOperator):
        def __init__(self, max_tokens: int = 512) -> None:
            self.max_tokens = max_tokens

        def process(self, experiences):
            kept = [experience for experience in experiences if len(experience) <= self.max_tokens]
            return kept, {}

What an operator leaves out is counted under its name. An operator that raises fails the run: it never drops in silence.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rollwright.config.modes import OperatorConfig
from rollwright.errors import ConfigError, TrajectoryError
from rollwright.experience.experience import Experience

#: Module that registers the built-in operators; imported when a name is first looked up.
_BUILT_IN = "rollwright.experience.built_in_operators"


class ExperienceOperator(ABC):
    """One step of the pipeline."""

    @abstractmethod
    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """Filters or changes experiences.

        Args:
            experiences: those of one task; ``experience.eid`` says which sample each is from.

        Returns:
            The experiences that go on, and numbers for the run's metrics.
        """


Registered = TypeVar("Registered", bound=type)


class OperatorRegistry:
    """Names of operators; users add theirs with ``register_module``."""

    def __init__(self) -> None:
        self._operators: dict[str, type] = {}

    def register_module(self, name: str) -> Callable[[Registered], Registered]:
        """Class decorator: registers an operator under a name.

        Raises:
            ConfigError: another class has the name. The same module and qualified name replaces itself.
        """

        def register(operator: Registered) -> Registered:
            taken = self._operators.get(name)
            if taken is not None and _path(taken) != _path(operator):
                raise ConfigError(
                    f"operator name {name!r} is taken by {_path(taken)}: register {_path(operator)} under another."
                )
            self._operators[name] = operator
            return operator

        return register

    def get(self, name: str) -> type:
        """The operator registered as ``name``, or at the import path ``package.module.Class``.

        Raises:
            ConfigError: there is none; the message lists the registered names.
        """
        importlib.import_module(_BUILT_IN)
        if name in self._operators:
            return self._operators[name]
        module, _, attribute = name.rpartition(".")
        if module:
            try:
                return getattr(importlib.import_module(module), attribute)
            except (ModuleNotFoundError, AttributeError) as error:
                raise ConfigError(f"store.operators names {name!r}, which cannot be imported: {error}.") from error
        near = difflib.get_close_matches(name, self._operators, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "register it with @OPERATORS.register_module, or give its import path."
        raise ConfigError(f"store.operators names {name!r}; registered are {', '.join(sorted(self._operators))}. {hint}")

    def build(self, name: str, arguments: Mapping[str, Any]) -> ExperienceOperator:
        """An operator with its arguments.

        Raises:
            ConfigError: there is no such operator, or it does not take these arguments.
        """
        operator = self.get(name)
        try:
            inspect.signature(operator).bind(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"store.operators: {name!r} was given {dict(arguments)}, but {error}; it takes {inspect.signature(operator)}."
            ) from None
        return operator(**arguments)


def _path(operator: type) -> str:
    return f"{operator.__module__}.{operator.__qualname__}"


#: The one registry of operators.
OPERATORS = OperatorRegistry()


@dataclass
class PipelineResult:
    """What a pipeline made of one task's samples."""

    samples: list[list[Experience]]
    drops: dict[str, int] = field(default_factory=dict)  # rows, by the operator's name
    metrics: dict[str, float] = field(default_factory=dict)  # "<operator>/<metric>"


class ExperiencePipeline:
    """Operators in order.

    Args:
        operators: names with arguments, from the config, or ``(name, operator)`` pairs.
    """

    def __init__(self, operators: Sequence[OperatorConfig | tuple[str, ExperienceOperator]] = ()) -> None:
        self._steps: list[tuple[str, ExperienceOperator]] = [
            (item.name, OPERATORS.build(item.name, item.args)) if isinstance(item, OperatorConfig) else item
            for item in operators
        ]

    def apply(self, samples: Sequence[Experience | Sequence[Experience]]) -> PipelineResult:
        """Runs the samples of one task through all operators; ``eid.run`` becomes each sample's place.

        Args:
            samples: each one experience or a list of them, as the workflow returned them.

        Returns:
            What is left of each sample (samples with nothing left are gone), what was dropped, and metrics. It is what
            ``ExperienceStore.finish_task`` takes: ``finish_task(claim, result.samples, drops=result.drops)``.

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
        for name, operator in self._steps:
            if not current:
                break
            before = len(current)
            try:
                current, metrics = operator.process(list(current))
            except Exception as error:  # of a user's operator
                raise TrajectoryError(
                    f"operator {name!r} failed on the experiences of group {current[0].eid.group!r}: {type(error).__name__}: {error}. "
                    "Mend it or take it out of store.operators."
                ) from error
            if len(current) < before:
                result.drops[name] = result.drops.get(name, 0) + before - len(current)
            result.metrics.update({f"{name}/{metric}": float(value) for metric, value in metrics.items()})
        rebuilt: dict[int, list[Experience]] = {}
        for position, experience in enumerate(current):  # an experience that an operator made is a sample of its own
            rebuilt.setdefault(place.get(str(experience.eid), len(nested) + position), []).append(experience)
        result.samples = [rebuilt[index] for index in sorted(rebuilt)]
        return result
