"""Base classes of workflows and of engines bound to a sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rollwright.errors import EngineError
from rollwright.inference.engine import InferenceEngine


class RolloutWorkflow(ABC):
    """The code of one episode. Any class that defines ``arun_episode`` is accepted as a workflow; subclassing is optional."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Run one episode on one task.

        Args:
            engine: an engine bound to this sample; it records every request that it serves.
            data: the task, a row of the taskset.

        Returns:
            A trajectory (dict of ``[B, L]`` tensors), a list of ``Experience``, the short form
            ``{"input_ids": [P], "output_ids": [N], "reward": float}``, or ``None`` to reject the sample on purpose.
        """


class TaskDraws(ABC):
    """Draws a part of each task, such as an opponent, from the results of earlier tasks. A workflow has it as its attribute ``draws``.

    The executor completes a task when it takes it from the dataset, so the draw is in the task's row: on workers, in the journal, and in
    checkpoints. It learns the results of finished groups when a batch is delivered, in the order of their tasks. The state is in the
    recovery checkpoint, so a resumed run continues with the same results.
    """

    @abstractmethod
    def complete(self, data: dict[str, Any], version: int) -> dict[str, Any]:
        """Return a task with what is drawn for it; ``version`` is that of the policy. A complete task is returned unchanged."""

    @abstractmethod
    def result(self, data: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Any:
        """Return what a group has shown: a value that JSON can hold, or None for nothing.

        Args:
            data: its task.
            rows: trajectories of its samples.
        """

    @abstractmethod
    def learn(self, result: Any) -> None:
        """Use the result of a group in later draws."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, for a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of ``state_dict``."""


class SampleBoundEngine(InferenceEngine):
    """An engine bound to one run of a workflow. It answers requests, but cannot be paused or changed by the workflow.

    Attributes:
        samples_asked: number of samples that the run should return, if its workflow can return several.
        sample_of_row: number of the sample that each returned row belongs to. None if the executor decides.
    """

    samples_asked: int = 1
    sample_of_row: list[int] | None = None

    def asking(self, model: InferenceEngine) -> InferenceEngine:
        """Return an engine that answers this sample's requests with another model, one that is not trained.

        Its requests are seeded and recorded like those of the policy.
        """
        raise EngineError(f"{type(self).__name__} cannot ask another model than the policy.")

    def set_version(self, version: int) -> None:
        """Raise an error, because only the trainer publishes versions."""
        self._refuse("set_version")

    def pause(self) -> None:
        """Raise an error; see :meth:`set_version`."""
        self._refuse("pause")

    def resume(self) -> None:
        """Raise an error; see :meth:`set_version`."""
        self._refuse("resume")

    def _refuse(self, method: str) -> None:
        raise EngineError(
            f"a workflow called engine.{method}(): the engine it was given is bound to its sample. Call {method} on the rollout "
            "engine, outside of the workflow."
        )
