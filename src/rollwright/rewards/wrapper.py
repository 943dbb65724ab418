"""``AsyncRewardWrapper``: any reward function as an awaitable that cannot hang, crash or block the rollout."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rollwright.errors import RewardError
from rollwright.rewards.calling import CallShape, is_async, runs_inline, task_name
from rollwright.rewards.pool import FunctionFailedError, WorkerCrashError, WorkerTimeoutError, shared_pool
from rollwright.rewards.registry import REWARD_FUNCTIONS
from rollwright.rewards.worker import as_float

_keys = itertools.count(1)

#: Seconds before an async function is tried again; doubled each time.
FIRST_PAUSE = 0.1


class AsyncRewardWrapper:
    """Calls a reward function under a time limit, wherever that is safe.

    * An **async** function is awaited on the caller's event loop and cancelled when its time is up.
    * A **sync** function runs in a worker process of ours (lambdas and closures too, sent by cloudpickle) and is killed with
      its worker when its time is up or when it takes its worker down; the next call gets a new worker.
    * A function whose attribute ``runs_inline`` is true promises to be pure, quick and bounded, as the built-in text
      rewards are: it is called directly.

    See ``rollwright.rewards.calling`` for how the columns of a task reach the function.
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
            reward_fn: the function, a name in ``REWARD_FUNCTIONS`` or an import path.
            timeout_seconds: limit of one attempt, from when the function begins to run. A function that hung is not tried
                again.
            max_workers: worker processes at most, shared by the wrappers that ask for as many; None: one for each CPU.
            max_retries: how often a function that raised or crashed is tried again.

        Raises:
            RewardError: a number is out of range, no function has that name, or it cannot take the four arguments.
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
        if isinstance(reward_fn, AsyncRewardWrapper):
            reward_fn = reward_fn.reward_fn
        if not callable(reward_fn):
            raise RewardError(f"{reward_fn!r} is no reward function; give a callable, a registered name or an import path.")
        self.reward_fn: Callable[..., Any] = reward_fn
        self.timeout_seconds = float(timeout_seconds)
        self.max_workers = max_workers
        self.max_retries = max_retries
        self._shape = CallShape(reward_fn)
        self._is_async = is_async(reward_fn)
        self._inline = runs_inline(reward_fn) and not self._is_async
        self._key = next(_keys).to_bytes(8, "little")
        self._pickled: bytes | None = None

    async def __call__(self, prompt: Any, completion: Any, prompt_ids: Any, completion_ids: Any, /, **data: Any) -> float:
        """Score one completion.

        Args:
            prompt, completion: text.
            prompt_ids, completion_ids: token ids.
            data: the task's columns; they may have any names, also those of the four above.

        Returns:
            A finite float.

        Raises:
            RewardError: the function kept failing, hung, crashed its worker, or returned what is no finite number; the
                message names function and task and ends with the cause.
        """
        arguments = (prompt, completion, prompt_ids, completion_ids)
        keywords = self._shape.keywords(data)
        if self._inline:
            try:
                return as_float(self.reward_fn(*arguments, **keywords))
            except Exception as error:
                raise self._error(prompt, data, f"failed: {type(error).__name__}: {error}") from error
        attempt = self._awaited if self._is_async else self._apart
        for tries in itertools.count(1):
            try:
                return await attempt(arguments, keywords)
            except WorkerTimeoutError as error:
                remedy = "make it faster or raise timeout_seconds"
                raise self._error(prompt, data, f"did not return within {self.timeout_seconds:g} s; {remedy}") from error
            except Exception as error:
                if tries <= self.max_retries and not isinstance(error, _NotSendableError):
                    if self._is_async:
                        await asyncio.sleep(FIRST_PAUSE * 2 ** (tries - 1))
                    continue
                raise self._error(prompt, data, self._cause(error, tries)) from error
        raise AssertionError("unreachable")

    async def _awaited(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> float:
        try:
            async with asyncio.timeout(self.timeout_seconds) as limit:
                return as_float(await self.reward_fn(*arguments, **keywords))
        except TimeoutError as error:
            if limit.expired():
                raise WorkerTimeoutError("no answer within the limit") from error
            raise  # the function's own, of a connection perhaps; worth another try

    async def _apart(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> float:
        function = self._pickled or self._pickle_function()
        try:
            body = pickle.dumps((arguments, keywords), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception:
            body = self._cloudpickle((arguments, keywords), "the task's columns")
        future = shared_pool(self.max_workers).submit(self._key, function, body, self.timeout_seconds)
        return await asyncio.wrap_future(future)

    def _pickle_function(self) -> bytes:
        import cloudpickle

        module = sys.modules.get(getattr(self.reward_fn, "__module__", None) or "")
        by_value = module is not None and module.__name__ != "__main__" and not _is_importable(module)
        if by_value:  # a plugin file that a worker could not import by name
            cloudpickle.register_pickle_by_value(module)
        try:
            self._pickled = self._cloudpickle(self.reward_fn, "the function")
        finally:
            if by_value:
                cloudpickle.unregister_pickle_by_value(module)
        return self._pickled

    @staticmethod
    def _cloudpickle(value: Any, what: str) -> bytes:
        import cloudpickle

        try:
            return cloudpickle.dumps(value)
        except Exception as error:
            raise _NotSendableError(
                f"{what} cannot be sent to a worker process ({type(error).__name__}: {error}); keep clients, locks and open "
                "files out of it, or make the function async"
            ) from error

    def _error(self, prompt: Any, data: dict[str, Any], what: str) -> RewardError:
        return RewardError(f"reward function {self._shape.name}, task {task_name(prompt, data)}: {what}")

    @staticmethod
    def _cause(error: Exception, tries: int) -> str:
        times = f" in each of {tries} attempts" if tries > 1 else ""
        if isinstance(error, _NotSendableError):
            return str(error)
        if isinstance(error, WorkerCrashError):
            return f"{error}{times}; the function ended its process: look for native crashes, memory and exit calls"
        if isinstance(error, FunctionFailedError):
            return f"failed{times}:\n{error}"
        return f"failed{times}: {type(error).__name__}: {error}"


class _NotSendableError(RewardError):
    """Function or arguments cannot be pickled; trying again cannot help."""


def _is_importable(module: ModuleType) -> bool:
    """True where a fresh process would find this very module by its name."""
    top = module.__name__.partition(".")[0]
    own = getattr(sys.modules.get(top), "__spec__", None)
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return own is None or spec.origin == own.origin
    return False
