"""Durable calls: results of tools, rewards, judges, clocks and random numbers are recorded, so that an episode can run again.

::

    @durable
    async def look_up(name: str) -> str: ...          # recorded: answered from the journal when the episode runs again

    now = durable(time.time)()                        # a clock, which a second run would read differently

    with durable("dice") as ask:                      # several calls under one name
        first, second = ask(random.random), ask(random.random)

A call is identified by its name, its arguments and the number of earlier calls with both. Outside an episode, a durable call is an ordinary
call.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, overload

import msgspec
import xxhash

from rollwright.errors import ReplayError, WorkflowError
from rollwright.experience.journal.records import DurableResult, pack_value, unpack_value

#: Kinds of durable calls: what happens to the call when its episode runs again.
KINDS = {
    "pure": "it is made again, because it depends only on its arguments and changes nothing",
    "recorded": "it is answered from the journal",
    "restart": "a replay answers it from the journal; a resumed run starts the episode over",
    "restorable": "it is answered from the journal, and its state is restored before the first new call",
}


class Past(Protocol):
    """The earlier run of an episode that runs again."""

    def next_result(self, name: str, key: int) -> DurableResult | None:
        """Return the next recorded result of a durable call, or None; each result is returned once, in order."""


class Episode(Protocol):
    """The journal of the running episode, as durable calls see it (``journal.writing.EpisodeWriter``)."""

    to_restore: dict[object, Callable[[], object]]

    @property
    def past(self) -> Past | None: ...

    def result(self, name: str, key: int, kind: str, started: float, **outcome: bytes | list[str] | None) -> None: ...

    def answered(self, result: DurableResult) -> None:
        """Write a durable call that the past answered."""

    def before_new_call(self, name: str) -> None:
        """Prepare for a durable call that the past does not contain; raise if the call must not be made."""


#: The episode of the current asyncio task; inherited by the tasks and threads that it starts.
EPISODE: ContextVar[Episode | None] = ContextVar("episode", default=None)


@dataclass(slots=True)
class _Call:
    """Value of a call, and whether the call must be made."""

    value: Any = None
    is_new: bool = True


class Durable:
    """Decorator and context manager for calls whose results are recorded.

    Args:
        name: name of the recorded calls. If empty, the function's name is used.
        kind: one of ``KINDS``.
        export: returns the state of a restorable environment after a call, as plain values.
        restore: receives this state before the first new call.
    """

    def __init__(
        self,
        name: str = "",
        kind: str = "recorded",
        export: Callable[[], Any] | None = None,
        restore: Callable[[Any], Any] | None = None,
    ) -> None:
        if kind not in KINDS:
            raise WorkflowError(f"durable(kind={kind!r}): choose from {', '.join(KINDS)}.")
        if (kind == "restorable") != (export is not None and restore is not None):
            raise WorkflowError("durable: kind='restorable' needs export and restore, and no other kind has them.")
        if inspect.iscoroutinefunction(export) or inspect.iscoroutinefunction(restore):
            raise WorkflowError("durable: export and restore are called without await; give plain functions.")
        self.name, self.kind, self.export, self.restore = name, kind, export, restore

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its results are recorded."""
        name = self.name or function_name(function)
        durable = self if self.name else Durable(name, self.kind, self.export, self.restore)

        @functools.wraps(function)
        async def asynchronous(*arguments: Any, **keywords: Any) -> Any:
            return await durable.awaited(function, *arguments, **keywords)

        @functools.wraps(function)
        def synchronous(*arguments: Any, **keywords: Any) -> Any:
            return durable.called(function, *arguments, **keywords)

        wrapper: Any = asynchronous if inspect.iscoroutinefunction(function) else synchronous
        wrapper.durable = durable
        return wrapper

    def __enter__(self) -> Callable[..., Any]:
        """Return a function ``call(function, *args)`` that makes and records a call; await it for async functions."""
        return lambda function, *arguments, **keywords: (
            self.awaited if inspect.iscoroutinefunction(function) else self.called
        )(function, *arguments, **keywords)

    def __exit__(self, *error: object) -> None: ...

    def called(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a function and record its result, or return the recorded one."""
        with self._kept(arguments, keywords) as call:
            if call.is_new:
                call.value = function(*arguments, **keywords)
        return call.value

    async def awaited(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Do the same as ``called`` for an async function."""
        with self._kept(arguments, keywords) as call:
            if call.is_new:
                call.value = await function(*arguments, **keywords)
        return call.value

    @contextmanager
    def _kept(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[_Call]:
        """Provide one call: either already answered by the journal, or to be made in the block and then recorded."""
        episode = EPISODE.get()
        if episode is None or self.kind == "pure":
            yield _Call()
            return
        key, started = call_key(arguments, keywords), time.time()
        if (result := self._answered(episode, key)) is not None:
            yield _Call(_value_of(result), is_new=False)
            return
        call = _Call()
        try:
            yield call
        except Exception as error:
            self._keep_error(episode, key, started, error)
            raise
        self._keep(episode, key, started, call.value)

    def _answered(self, episode: Episode, key: int) -> DurableResult | None:
        if episode.past is None:
            return None
        result = episode.past.next_result(self.name, key)
        if result is None:
            episode.before_new_call(self.name)
            return None
        episode.answered(result)
        if result.state is not None and self.restore is not None:
            episode.to_restore[self] = functools.partial(self.restore, unpack_value(result.state))
        return result

    def _keep(self, episode: Episode, key: int, started: float, value: Any) -> None:
        try:
            state = None if self.export is None else pack_value(self.export())
            episode.result(self.name, key, self.kind, started, value=pack_value(value), state=state)
        except (TypeError, OverflowError) as error:
            raise WorkflowError(
                f"durable call {self.name}: its result cannot be kept ({error}): return numbers, text, lists and dicts, or use "
                "kind='pure' if it may be made again."
            ) from error

    def _keep_error(self, episode: Episode, key: int, started: float, error: Exception) -> None:
        kind = type(error)
        episode.result(self.name, key, self.kind, started, error=[f"{kind.__module__}:{kind.__qualname__}", str(error)])


@overload
def durable(call: Callable[..., Any], /) -> Callable[..., Any]: ...


@overload
def durable(
    call: str | None = None,
    /,
    *,
    kind: str = "recorded",
    export: Callable[[], Any] | None = None,
    restore: Callable[[Any], Any] | None = None,
) -> Durable: ...


def durable(call: Any = None, /, **settings: Any) -> Any:
    """Record the results of calls in the journal, so that their episode can run again; see the module's docstring.

    ``rollwright replay`` answers all kinds but ``pure`` from the journal and makes no call that was not recorded. A resumed run continues
    its unfinished episodes: their calls are answered in the same way, ``restore`` of a ``restorable`` call runs before the first new call,
    and an episode that made a ``restart`` call starts over.

    Args:
        call: a function to wrap; or a name, or nothing, to get a decorator or context.
        settings: ``kind`` (``pure``, ``recorded``, ``restart`` or ``restorable``); ``export`` and ``restore`` for ``restorable``.
    """
    return Durable(**settings)(call) if callable(call) else Durable(call or "", **settings)


def kept_calls(function: Callable[..., Any], name: str) -> tuple[Callable[..., Any], Durable]:
    """Unwrap a user's function; return it with a ``Durable`` of its own kind, or of kind ``recorded`` if it is not durable.

    Meant for callers that record more of a call than its value, such as the text that a model is shown after a failure.
    """
    own = getattr(function, "durable", None)
    if isinstance(own, Durable):
        return function.__wrapped__, Durable(name, own.kind, own.export, own.restore)  # type: ignore[attr-defined]
    return function, Durable(name)


def without_partials(function: Any) -> Any:
    """Return the function inside of partials."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def function_name(function: Callable[..., Any]) -> str:
    """Return the module and qualified name of a function, or of the class of an object."""
    function = without_partials(function)
    module = getattr(function, "__module__", None) or "builtins"
    return f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def call_key(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> int:
    """Hash a call's arguments, independently of the order of sets and dicts; objects without a plain value are hashed by class."""
    values = [arguments, sorted(keywords.items())]
    try:
        packed = _KEYS.encode(values)
    except (OverflowError, UnicodeEncodeError, TypeError):
        # Integers of more than 64 bits and lone surrogates (models write both), and sets and keys that cannot be sorted.
        packed = _KEYS.encode(_packable(values))
    return xxhash.xxh3_64_intdigest(packed)


def _packable(value: Any) -> Any:
    """Replace values that MessagePack does not support by strings, bytes or lists."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        return sorted(([_packable(key), _packable(item)] for key, item in value.items()), key=_KEYS.encode)
    if isinstance(value, set | frozenset):
        return sorted(map(_packable, value), key=_KEYS.encode)
    if isinstance(value, list | tuple):
        return [_packable(item) for item in value]
    return value


def _class_of(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return f"{type(value).__module__}.{type(value).__qualname__}"


_KEYS = msgspec.msgpack.Encoder(enc_hook=_class_of, order="deterministic")


def _value_of(result: DurableResult) -> Any:
    if result.error is None:
        assert result.value is not None
        return unpack_value(result.value)
    name, message = result.error
    module, _, attribute = name.partition(":")
    kind = getattr(sys.modules.get(module), attribute, None)  # only if its module is loaded: a file never causes an import
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            raise kind(message)
        except TypeError:
            if kind is TypeError:
                raise
    raise ReplayError(f"durable call {result.name} raised {name.replace(':', '.')} when it was recorded: {message}")
