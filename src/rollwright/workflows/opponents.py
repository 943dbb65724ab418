"""Models that play but are not trained: models in directories, and earlier versions of the run. They are sampled with the built-in engine.

The opponent of a task depends only on the task, its ordinal, and the checkpoints that are not newer than the policy. A resumed run
therefore draws the same opponents, without any stored state.
"""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic

from rollwright.errors import ConfigError
from rollwright.inference.engine import InferenceEngine, takes_no_weights
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.weights.files import numbered

ENGINES_KEPT = 4  # models in memory; to load another one, the least recently used idle model is unloaded


@dataclass
class Pool:
    """Earlier versions of a run, as opponents.

    Args:
        directory: the run's checkpoints, ``step-000010`` and so on, which ``saver.every_steps`` writes.
        choose: ``uniform`` draws among all of them, ``newest`` takes the newest.
        share: share of the tasks that are played against an earlier version; in the others the policy plays itself.
    """

    directory: str
    choose: Literal["uniform", "newest"] = "uniform"
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.choose not in ("uniform", "newest") or not 0.0 <= self.share <= 1.0:
            raise ConfigError(
                f"pool: choose is {self.choose!r} and share {self.share!r}; choose is uniform or newest, and share is between 0 and 1."
            )

    def versions(self, newest: int) -> dict[str, str]:
        """Return the directories of the versions up to ``newest``, oldest first, by their names."""
        return {path.name: str(path) for step, path in numbered(Path(self.directory), "step-") if step <= newest}


class Opponents:
    """Frozen models by name. An engine starts when its model is first asked, and ends with this object or the process.

    Args:
        tokenizer: the policy's tokenizer, which is also theirs.
        fixed: directory of each model, in Hugging Face form, by name. Every task gets one of them.
        pool: a :class:`Pool`, or a mapping with its arguments; only without ``fixed``.

    Raises:
        ConfigError: a directory does not exist, both are given, or the pool has wrong arguments.
    """

    def __init__(
        self, tokenizer: Any, fixed: Mapping[str, str] | None = None, pool: Pool | Mapping[str, Any] | None = None
    ) -> None:
        self.fixed = dict(fixed or {})
        if missing := [f"{name} ({path})" for name, path in self.fixed.items() if not Path(path).is_dir()]:
            raise ConfigError(
                f"opponents: no such directory: {', '.join(missing)}. Give a model's directory, such as a checkpoint."
            )
        if self.fixed and pool:
            raise ConfigError("opponents and pool are both given: a task has one opponent, so give one of the two.")
        try:
            self.pool = pydantic.TypeAdapter(Pool).validate_python(pool) if isinstance(pool, Mapping) else pool
        except pydantic.ValidationError as error:
            raise ConfigError(f"pool: {error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}.") from None
        self._tokenizer = tokenizer
        self._engines: OrderedDict[str, Any] = OrderedDict()
        self._asking: Counter[str] = Counter()  # requests that run, by model
        self._lock, self._loading = threading.Lock(), threading.Lock()
        weakref.finalize(self, _destroy, self._engines)

    def draw(self, task: str, version: int) -> tuple[str, str] | None:
        """Draw the opponent of a task.

        Args:
            task: identifies the task and its draw.
            version: version of the policy.

        Returns:
            Name and directory of the opponent; None if the policy plays itself.
        """
        dice = random.Random(f"opponent {task}")
        candidates = list(self.fixed.items())
        if self.pool is not None:
            if dice.random() >= self.pool.share:
                return None
            candidates = list(self.pool.versions(version).items())
            candidates = candidates[-1:] if self.pool.choose == "newest" else candidates
        return dice.choice(candidates) if candidates else None

    def engine(self, path: str) -> InferenceEngine:
        """Return an engine that samples the model in a directory."""
        return FrozenModel(self, path)

    async def answer(self, path: str, request: ModelRequest) -> ModelResponse:
        """Sample one completion of the model in a directory, which is loaded unless it is still in memory."""
        with self._lock:
            self._asking[path] += 1  # before it is loaded, so that nothing unloads it again
        try:
            return await (await asyncio.to_thread(self._open, path)).agenerate(request)
        finally:
            with self._lock:
                self._asking[path] -= 1

    def _open(self, path: str) -> InferenceEngine:
        from rollwright.inference.backends.builtin.engine import BuiltinEngine

        with self._loading:
            if path not in self._engines:
                with self._lock:
                    idle = [each for each in self._engines if not self._asking[each]]
                    for each in idle[: max(0, len(self._engines) - ENGINES_KEPT + 1)]:
                        self._engines.pop(each).destroy()
                # batch-invariant: an answer does not depend on which games are played at the same time
                engine = BuiltinEngine(path, self._tokenizer, batch_invariant=True)
                engine.initialize()
                self._engines[path] = engine
            self._engines.move_to_end(path)
            return self._engines[path]


class FrozenModel(InferenceEngine):
    """The engine of one opponent. Its version is 0, and it takes no weights.

    Args:
        opponents: loads the model.
        path: directory of the model.
    """

    def __init__(self, opponents: Opponents, path: str) -> None:
        self._opponents = opponents
        self._path = path

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """See :meth:`InferenceEngine.agenerate`."""
        return await self._opponents.answer(self._path, request)

    def get_version(self) -> int:
        """Return 0."""
        return 0

    def set_version(self, version: int) -> None:
        """Raise an error, because the model is frozen."""
        raise takes_no_weights(self)

    def pause(self) -> None:
        """Do nothing: a frozen model may answer while weights are published."""

    def resume(self) -> None:
        """Do nothing; see :meth:`pause`."""

    def abort(self, rid: str | None = None) -> None:
        """Do nothing: the moves of a game are short, so a request that is no longer needed soon ends."""


def _destroy(engines: dict[str, Any]) -> None:
    for engine in engines.values():
        engine.destroy()
