"""``AsyncRewardWrapper`` makes any reward function awaitable, so that it cannot hang, crash or block the rollout.

A reward function is called as ``(prompt, completion, prompt_ids, completion_ids, **columns)``. The first four arguments are positional,
so their names do not matter. The task's columns are keywords, except columns that have the name of one of the function's first four
parameters; a function without ``**kwargs`` gets only the columns that it has parameters for. A parameter named ``data`` receives the
whole row as a dict, including the columns that were left out. If a workflow calls the wrapper with another number of positional
arguments, all arguments are passed on unchanged.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import pickle
import re
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rollwright.errors import BrokenRewardError, RewardError
from rollwright.experience.durable import function_name, kept_calls, without_partials
from rollwright.processes.pool import FunctionFailedError, WorkerCrashError, WorkerTimeoutError, shared_pool
from rollwright.processes.sandbox import sandbox_name, sandboxed
from rollwright.registry import why_not_called
from rollwright.rewards.registry import REWARD_FUNCTIONS, RewardFn, SummedParts
from rollwright.rewards.score import Score, as_score, packed, unpacked
from rollwright.tracking.metrics import get_tracker

#: The positional arguments of every reward function.
POSITIONAL = ("prompt", "completion", "prompt_ids", "completion_ids")
#: Columns that identify a task in messages, in order of preference.
TASK_COLUMNS = ("ordinal", "task_id", "query_id", "id", "index")
#: Prefix of the names of reward calls in the journal.
REWARD_CALLS = "reward "
#: Exceptions caused by the code, not by the environment, so that a retry would raise them again.
FAULTS = (
    "TypeError",
    "AttributeError",
    "NameError",
    "UnboundLocalError",
    "ImportError",
    "ModuleNotFoundError",
    "NotImplementedError",
)
#: Number of equal faults (see ``fault_of``) without a success in between after which a call is not retried; if they come from several
#: tasks, the function is considered broken.
EQUAL_FAULTS = 3
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in ', re.MULTILINE)
#: Seconds before an async function is retried; doubled for each further attempt.
FIRST_PAUSE = 0.1

_keys = itertools.count(1)


class AsyncRewardWrapper:
    """Calls a reward function with a time limit, isolated from the rollout.

    * An **async** function is awaited on the caller's event loop, and cancelled at the time limit.
    * A **sync** function, which may be a lambda or a closure, runs in a worker process, which is killed at the time limit. After a kill
      or a crash, the next call gets a new worker.
    * An async function whose attribute ``limits_itself`` is True has its own time limit and retries, like ``rewards.http.HttpReward``.
    * A function whose attribute ``runs_inline`` is True must be pure, fast and bounded, as the built-in text rewards are. It is called
      directly.

    After three equal code errors with no success in between, such as a ``TypeError`` at the same line, the call is not retried. If these
    errors come from more than one task, the run stops (``BrokenRewardError``).

    A function may also return a mapping (``Score.of_mapping``): its parts and texts are kept with the sample as ``reward/NAME``, and the
    parts are also metrics.

    Scores of functions that do not run inline are recorded in the journal (``durable``), so a replayed episode gets the same score.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        timeout_seconds: float = 15,
        max_workers: int | None = None,
        max_retries: int = 3,
    ) -> None:
        """Wrap a function.

        Args:
            reward_fn: the function, a name in ``REWARD_FUNCTIONS``, an import path or the URL of a service.
            timeout_seconds: time limit of one attempt, from when the function begins to run. A function that times out is not
                retried.
            max_workers: maximum number of worker processes; wrappers that have the same number share them. None uses one per CPU.
            max_retries: how often a function that raised or crashed is retried.

        Raises:
            RewardError: a number is out of range, or ``reward_fn`` is neither callable nor the name of a function.
        """
        if timeout_seconds <= 0 or max_retries < 0 or (max_workers is not None and max_workers < 1):
            raise RewardError(
                f"AsyncRewardWrapper(timeout_seconds={timeout_seconds}, max_workers={max_workers}, max_retries={max_retries}): "
                "the limit is above 0, workers are at least 1 and retries at least 0."
            )
        if isinstance(reward_fn, str):
            reward_fn = REWARD_FUNCTIONS.get(reward_fn)
        if isinstance(reward_fn, type):
            reward_fn = reward_fn()
        if isinstance(reward_fn, RewardFn):
            reward_fn = SummedParts(reward_fn)
        if isinstance(reward_fn, AsyncRewardWrapper):
            reward_fn = reward_fn.reward_fn
        if not callable(reward_fn):
            raise RewardError(f"{reward_fn!r} is no reward function; give a callable, a registered name or an import path.")
        inner = without_partials(reward_fn)
        self.timeout_seconds = float(timeout_seconds)
        self.max_workers = max_workers
        self.max_retries = max_retries
        self._is_async = is_async(inner)
        self._inline = getattr(inner, "runs_inline", False) is True and not self._is_async
        self._limits_itself = getattr(inner, "limits_itself", False) is True and self._is_async
        self._imports = tuple(getattr(inner, "worker_imports", ()))
        self._key = next(_keys).to_bytes(8, "little")
        self.reward_fn, self._durable = kept_calls(reward_fn, f"{REWARD_CALLS}{function_name(inner)}")
        self._pickled: bytes | None = None
        self._faults: list[tuple[str, str]] = []  # since the last success: (fault, task)

    @functools.cached_property
    def columns(self) -> TaskColumns:
        """The columns of a task that the function receives.

        Raises:
            RewardError: the function cannot be called as ``(prompt, completion, prompt_ids, completion_ids, **columns)``.
        """
        return TaskColumns(self.reward_fn)

    async def __call__(self, /, *arguments: Any, **data: Any) -> float:
        """Score one completion.

        Args:
            arguments: prompt and completion as strings, and the token ids of both; or any arguments of the function.
            data: if the four arguments are given, the task's columns, which may have any names, even those of the function's first four
                parameters; otherwise keyword arguments of the function.

        Returns:
            A finite float.

        Raises:
            RewardError: the function does not accept the arguments, kept failing, hung, crashed its worker, or did not return a
                finite number; the message names the function and the task, and ends with the cause.
            BrokenRewardError: the function keeps failing in the same way for several tasks.
        """
        prompt = arguments[0] if arguments else next(iter(data.values()), "")
        keywords = self.columns.keywords(data) if len(arguments) == len(POSITIONAL) else self._as_given(arguments, data)
        if self._inline:
            try:
                reward = as_score(self.reward_fn(*arguments, **keywords))
            except Exception as error:
                self._is_enough(error, prompt, data)
                raise self._error(error, 1, prompt, data) from error
            self._faults.clear()
            return _reported(reward)
        return _reported(unpacked(await self._durable.awaited(self._scored, arguments, keywords, prompt, data)))

    async def _scored(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any], prompt: Any, data: dict[str, Any]
    ) -> float | dict[str, Any]:
        """Return a reward as the journal keeps it: a number, or a dict if it has parts or notes."""
        attempt = self._in_loop if self._is_async else self._in_worker
        for tries in itertools.count(1):
            try:
                reward = await attempt(arguments, keywords)
                self._faults.clear()
                return packed(reward)
            except Exception as error:
                is_hopeless = isinstance(error, WorkerTimeoutError | _NotSendableError) or self._is_enough(error, prompt, data)
                if tries > self.max_retries or is_hopeless or self._limits_itself:
                    raise self._error(error, tries, prompt, data) from error
                if self._is_async:
                    await asyncio.sleep(FIRST_PAUSE * 2 ** (tries - 1))
        raise AssertionError("unreachable")

    def _as_given(self, arguments: tuple[Any, ...], data: dict[str, Any]) -> dict[str, Any]:
        if why := why_not_called(self.reward_fn, *arguments, **data):
            called = f"{function_name(self.reward_fn)}{inspect.signature(self.reward_fn)}"
            raise RewardError(f"reward function {called} was not called as it is defined: {why}.")
        return data

    async def _in_loop(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> float:
        try:
            async with asyncio.timeout(None if self._limits_itself else self.timeout_seconds) as limit:
                with sandboxed():  # a separate jail from that of the episode being scored
                    return as_score(await self.reward_fn(*arguments, **keywords))
        except TimeoutError as error:
            if limit.expired():
                raise WorkerTimeoutError("no answer within the limit") from error
            raise  # raised by the function itself, perhaps for a connection; retried

    async def _in_worker(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> float:
        function = self._pickled or self._pickle_function()
        arguments = (sandbox_name(), *arguments)
        try:
            body = pickle.dumps((arguments, keywords), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception:
            body = _cloudpickle((arguments, keywords), "the task's columns")
        submitted = shared_pool(self.max_workers).submit(self._key, function, body, self.timeout_seconds)
        return unpacked(await asyncio.wrap_future(submitted))

    def _pickle_function(self) -> bytes:
        import cloudpickle

        module = sys.modules.get(getattr(self.reward_fn, "__module__", None) or "")
        by_value = module is not None and module.__name__ != "__main__" and not _is_importable(module)
        if by_value:  # a plugin file that a worker could not import by name
            cloudpickle.register_pickle_by_value(module)
        try:
            self._pickled = _cloudpickle((functools.partial(_score, self.reward_fn), self._imports), "the function")
        finally:
            if by_value:
                cloudpickle.unregister_pickle_by_value(module)
        return self._pickled

    def _error(self, error: Exception, tries: int, prompt: Any, data: dict[str, Any]) -> RewardError:
        """Build the exception of a failed call.

        Args:
            error: exception of the last attempt.
            tries: number of attempts.
            prompt: prompt of the task, for the message.
            data: columns of the task, for the message.
        """
        kind, times = RewardError, f" in each of {tries} attempts" if tries > 1 else ""
        if len(self._faults) >= EQUAL_FAULTS and len({task for _, task in self._faults}) > 1:
            kind = BrokenRewardError
            times += f" (the same {len(self._faults)} times, for several tasks, with no success between: correct the function)"
        if isinstance(error, WorkerTimeoutError):
            what = f"did not return within {self.timeout_seconds:g} s; make it faster or raise timeout_seconds"
        elif isinstance(error, _NotSendableError):
            what = str(error)
        elif isinstance(error, WorkerCrashError):
            what = f"{error}{times}; the function ended its process: look for native crashes, memory and exit calls"
        elif isinstance(error, FunctionFailedError):
            what = f"failed{times}:\n{error}"
        else:
            what = f"failed{times}: {type(error).__name__}: {error}"
        return kind(f"reward function {function_name(self.reward_fn)}, task {task_name(prompt, data)}: {what}")

    def _is_enough(self, error: Exception, prompt: Any, data: dict[str, Any]) -> bool:
        """Record an attempt's exception, and return whether the same fault has occurred ``EQUAL_FAULTS`` times."""
        if (fault := fault_of(error)) is None:
            self._faults.clear()
            return False
        self._faults = [*(known for known in self._faults if known[0] == fault), (fault, task_name(prompt, data))]
        return len(self._faults) >= EQUAL_FAULTS


def fault_of(error: BaseException) -> str | None:
    """Return the type and location of an exception that only code can cause, or None for other exceptions.

    Exceptions with equal results count as the same fault.
    """
    if isinstance(error, FunctionFailedError):  # the message is the worker's traceback
        name = str(error).rsplit("\n", 1)[-1].partition(":")[0]
        frames = _FRAME.findall(str(error))
    else:
        name = type(error).__name__
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return f"{name} at {frames[-1:]}" if name in FAULTS else None


class TaskColumns:
    """The columns of a task's row that a function receives as keywords.

    Raises:
        RewardError: the function does not take the four positional arguments.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function_name = function_name(function)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # builtins without a signature accept anything
            parameters = list(inspect.signature(lambda *positional, **columns: None).parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) < len(POSITIONAL) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise RewardError(
                f"reward function {self.function_name}{inspect.signature(function)} takes {len(positional)} positional arguments; "
                f"reward functions are called as ({', '.join(POSITIONAL)}, **columns): give it these four parameters first."
            )
        rest = [p for p in positional[len(POSITIONAL) :] if p.kind is p.POSITIONAL_OR_KEYWORD]
        rest += [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._positional = {p.name for p in positional[: len(POSITIONAL)] if p.kind is p.POSITIONAL_OR_KEYWORD}
        self._keywords = {p.name for p in rest}
        self._required = {p.name for p in rest if p.default is p.empty} - {"data"}
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def keywords(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords for one row.

        Raises:
            RewardError: the function requires a column that the row does not have.
        """
        if missing := sorted(self._required - data.keys()):
            raise RewardError(
                f"reward function {self.function_name} needs {', '.join(missing)}, but the task has the columns "
                f"{', '.join(sorted(map(str, data))) or 'none'}; rename the column or give the parameter a default."
            )
        wanted = data.keys() - self._positional if self._takes_all else data.keys() & self._keywords
        out = {key: value for key, value in data.items() if key in wanted}
        if "data" in self._keywords:
            out["data"] = data
        return out


def _reported(reward: float) -> float:
    """Report the parts and notes of a reward, and return it as a plain number."""
    if isinstance(reward, Score):
        tracker = get_tracker("rollout/reward")
        tracker.scalar(**reward.parts)
        tracker.note(**reward.notes)
    return float(reward)


def is_async(function: Any) -> bool:
    """Return whether calls have to be awaited: True for coroutine functions, their partials, and objects with an async ``__call__``."""
    function = without_partials(function)
    called = getattr(function, "__call__", None)  # noqa: B004
    return not isinstance(function, type) and any(map(inspect.iscoroutinefunction, (function, called)))


def task_name(prompt: Any, data: dict[str, Any]) -> str:
    """Return the name of a task for messages: its ordinal or id, or else the beginning of its prompt."""
    names = (f"{column} {data[column]}" for column in TASK_COLUMNS if isinstance(data.get(column), int | str))
    return next(names, f"with prompt {str(prompt)[:80]!r}")


def _score(function: Callable[..., Any], sandbox: str, /, *arguments: Any, **keywords: Any) -> float | dict[str, Any]:
    """Run a reward function in a worker; return a JSON value."""

    async def awaited() -> Any:
        return await value

    with sandboxed(sandbox):
        value = function(*arguments, **keywords)
        return packed(as_score(asyncio.run(awaited()) if inspect.isawaitable(value) else value))


class _NotSendableError(RewardError):
    """The function or its arguments cannot be pickled; a retry would fail as well."""


def _cloudpickle(value: Any, what: str) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise _NotSendableError(
            f"{what} cannot be sent to a worker process ({type(error).__name__}: {error}); keep clients, locks and open "
            "files out of it, or make the function async"
        ) from error


def _is_importable(module: ModuleType) -> bool:
    """Return whether a new process would import the same module by its name."""
    top = module.__name__.partition(".")[0]
    own = getattr(sys.modules.get(top), "__spec__", None)
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return own is None or spec.origin == own.origin
    return False
