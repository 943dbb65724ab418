"""Models that play but are not trained: models in directories, and earlier versions of the run. They are sampled with the built-in engine.

The opponent of a task depends on the task, its ordinal, the checkpoints that are not newer than the policy and, with ``choose: win_rate``,
the results of earlier tasks, which are in the recovery checkpoint. A resumed run therefore draws the same opponents.
"""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic

from rollwright.errors import ConfigError, WorkflowError
from rollwright.experience.players import games_won
from rollwright.inference.engine import InferenceEngine, takes_no_weights
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.weights.files import base_and_adapter, numbered
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.base import SampleBoundEngine, TaskDraws
from rollwright.workflows.episode import task_name

POLICY = "policy"  #: Name of the trained model's rows.
DRAWN = "opponent"  #: Name of the model that was drawn from the pool, for programs that have its key.
ENGINES_KEPT = 4  # models in memory; to load another one, the least recently used idle model is unloaded


@dataclass
class Pool:
    """Earlier versions of a run, as opponents.

    ``choose: win_rate`` is prioritised fictitious self-play (AlphaStar, Vinyals et al. 2019, doi 10.1038/s41586-019-1724-z, Methods): a version
    that the policy beats with probability ``p`` has the weight ``(1 - p) ** hardness``. The estimate of ``p`` is ``(won + 1) / (games + 2)``,
    where a draw counts one half, so a version without games has 1/2. Earlier games count less, because the policy changes.

    Args:
        directory: the run's checkpoints, ``step-000010`` and so on, which ``saver.every_steps`` writes.
        choose: ``uniform`` draws among all of them, ``newest`` takes the newest, ``win_rate`` prefers those that beat the policy.
        share: share of the tasks that are played against an earlier version; in the others the policy plays itself.
        hardness: with ``win_rate``, how much hard opponents are preferred; 0 draws uniformly.
        decay: with ``win_rate``, what a game counts after one more game against the same version. 1 counts all games alike.
    """

    directory: str
    choose: Literal["uniform", "newest", "win_rate"] = "uniform"
    share: float = 0.5
    hardness: float = 2.0
    decay: float = 0.99

    def __post_init__(self) -> None:
        if self.choose not in ("uniform", "newest", "win_rate") or not 0.0 <= self.share <= 1.0:
            raise ConfigError(
                f"pool: choose is {self.choose!r} and share {self.share!r}; choose is uniform, newest or win_rate, and share is between "
                "0 and 1."
            )
        if not 0.0 <= self.hardness <= 100.0 or not 0.0 < self.decay <= 1.0:
            raise ConfigError(
                f"pool: hardness is {self.hardness!r} and decay {self.decay!r}; hardness is between 0 and 100, and decay above 0 and at "
                "most 1."
            )
        if self.choose != "win_rate" and (self.hardness, self.decay) != (2.0, 0.99):
            raise ConfigError(f"pool: hardness and decay belong to choose: win_rate, and choose is {self.choose}. Remove them.")

    def versions(self, newest: int) -> dict[str, str]:
        """Return the directories of the versions up to ``newest``, oldest first, by their names."""
        return {path.name: str(path) for step, path in numbered(Path(self.directory), "step-") if step <= newest}


class Opponents(TaskDraws):
    """Frozen models by name, and which of them plays a task. An engine starts when its model is first asked, and ends with this object or the process.

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
        #: With ``choose: win_rate``, games against each version and games won, each weighted by ``decay``.
        self.games: dict[str, tuple[float, float]] = {}
        self._tokenizer = tokenizer
        self._engines: OrderedDict[str, Any] = OrderedDict()
        self._asking: Counter[str] = Counter()  # requests that run, by model
        self._lock, self._loading = threading.Lock(), threading.Lock()
        weakref.finalize(self, _destroy, self._engines)

    def complete(self, data: dict[str, Any], version: int) -> dict[str, Any]:
        """Return a task with the name of its ``opponent``, or None if the policy plays itself. See :class:`TaskDraws`."""
        if "opponent" in data or not (self.fixed or self.pool):
            return data
        return {**data, "opponent": self.draw(f"{data.get('ordinal')} {task_name(data)}", version)}

    def draw(self, task: str, version: int) -> str | None:
        """Draw the opponent of a task.

        Args:
            task: identifies the task and its draw.
            version: version of the policy.

        Returns:
            Name of the opponent; None if the policy plays itself.
        """
        dice = random.Random(f"opponent {task}")
        if self.pool is None:
            return dice.choice(list(self.fixed)) if self.fixed else None
        if dice.random() >= self.pool.share:
            return None
        names = list(self.pool.versions(version))
        if not names:
            return None
        if self.pool.choose == "newest":
            return names[-1]
        if self.pool.choose == "uniform":
            return dice.choice(names)
        return dice.choices(names, [(1 - self.win_rate(name)) ** self.pool.hardness for name in names])[0]

    def win_rate(self, name: str) -> float:
        """Estimate the probability that the policy beats a version; 1/2 without games."""
        games, won = self.games.get(name, (0.0, 0.0))
        return (won + 1.0) / (games + 2.0)

    def directory(self, name: str) -> str:
        """Return the directory of an opponent.

        Raises:
            WorkflowError: there is no such opponent.
        """
        if self.pool is None and name in self.fixed:
            return self.fixed[name]
        path = None if self.pool is None else Path(self.pool.directory, name)
        if path is None or not path.is_dir():
            raise WorkflowError(
                f"The task's opponent is {name!r}, and "
                + (
                    f"opponents has {', '.join(self.fixed) or 'none'}. Name one of them in the task's column opponent."
                    if path is None
                    else f"there is no directory {path}. Let saver.keep keep versions longer than tasks wait."
                )
            )
        return str(path)

    def result(self, data: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Any:
        """Return name, games and games won of a group that was played against a version, with ``choose: win_rate``."""
        name = data.get("opponent")
        if name is None or self.pool is None or self.pool.choose != "win_rate":
            return None
        return [name, *games_won(rows)]

    def learn(self, result: Any) -> None:
        """See :class:`TaskDraws`. The new estimate is the metric ``pool_win_rate/VERSION``."""
        name, played, won_now = result
        assert self.pool is not None
        games, won = self.games.get(name, (0.0, 0.0))
        kept = self.pool.decay**played
        self.games[name] = games * kept + played, won * kept + won_now
        get_tracker("rollout").scalar(**{f"pool_win_rate/{name}": self.win_rate(name)})

    def state_dict(self) -> dict[str, Any]:
        """See :class:`TaskDraws`."""
        return {"games": {name: list(counts) for name, counts in self.games.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`TaskDraws`."""
        self.games = {name: (games, won) for name, (games, won) in state["games"].items()}

    def engine(self, path: str) -> InferenceEngine:
        """Return an engine that samples the model in a directory."""
        return FrozenModel(self, path)

    def asked_in(self, engine: InferenceEngine, name: str) -> InferenceEngine:
        """Return an engine that answers the requests of a sample with an opponent.

        Args:
            engine: the sample's engine, or one that is bound to no sample.
            name: name of the opponent.
        """
        model = self.engine(self.directory(name))
        return engine.asking(model) if isinstance(engine, SampleBoundEngine) else model

    @property
    def keys(self) -> list[str]:
        """Names of the opponents that a program has keys for: the fixed ones, or ``opponent`` for the one that is drawn from the pool."""
        return list(self.fixed) if self.pool is None else [DRAWN]

    def players(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, tuple[str, InferenceEngine]]:
        """Return who answers for each of ``keys`` in a task: name and engine. If the policy is to play itself, it is the policy.

        Args:
            engine: the sample's engine.
            data: the task.
        """
        if self.pool is None:
            return {name: (name, self.asked_in(engine, name)) for name in self.fixed}
        name = self.complete(dict(data), engine.get_version())["opponent"]
        return {DRAWN: (POLICY, engine) if name is None else (name, self.asked_in(engine, name))}

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
                model, adapter = base_and_adapter(path)
                # batch-invariant: an answer does not depend on which games are played at the same time
                engine = BuiltinEngine(model, self._tokenizer, batch_invariant=True)
                engine.initialize()
                if adapter is not None:
                    engine.update_weights(version=1, weights=adapter)
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
