"""The base class of workflows: the code of one episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rollwright.inference.engine import InferenceEngine


class RolloutWorkflow(ABC):
    """How one episode goes. Anything with an ``arun_episode`` is accepted; subclassing is a courtesy to readers."""

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
