"""The registry of reward functions: by name, or by import path."""

from __future__ import annotations

import difflib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rollwright.errors import RewardError

F = TypeVar("F", bound=Callable[..., Any])

#: Modules that register the built-in functions; imported when a name is first looked up.
BUILT_IN = ("rollwright.rewards.text", "rollwright.rewards.math", "rollwright.rewards.countdown")


class RewardRegistry:
    """Names of reward functions. Users add theirs with ``register_module``."""

    def __init__(self, built_in: tuple[str, ...] = ()) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._built_in = built_in
        self._lock = threading.RLock()
        self._loaded = False

    def register_module(
        self, name: str, *, runs_inline: bool = False, worker_imports: tuple[str, ...] = ()
    ) -> Callable[[F], F]:
        """Decorator that registers a function, or a class whose instances are called, under a name.

        Args:
            name: what configs call it.
            runs_inline: a promise that it is pure, quick and bounded in time and memory whatever the completion holds; it
                is then called directly instead of in a worker process.
            worker_imports: modules that it imports when called; a worker imports them before the call's time begins.

        Raises:
            RewardError: the name is taken by another function. The same module and qualified name replaces itself, so
                that a cell may be run again.
        """
        if not isinstance(name, str):
            raise RewardError(
                f"register_module({name!r}): give the name, as in @REWARD_FUNCTIONS.register_module('my_reward')."
            )

        def register(function: F) -> F:
            with self._lock:
                taken = self._functions.get(name)
                if taken is not None and _identity(taken) != _identity(function):
                    raise RewardError(
                        f"reward name {name!r} is taken by {_identity(taken)}, so {_identity(function)} cannot have it; "
                        "register it under another name."
                    )
                self._functions[name] = function
            if runs_inline:
                function.runs_inline = True  # type: ignore[attr-defined]
            if worker_imports:
                function.worker_imports = worker_imports  # type: ignore[attr-defined]
            return function

        return register

    def get(self, name: str) -> Callable[..., Any]:
        """The function registered as ``name``, or found at the import path ``package.module.function``.

        Raises:
            RewardError: there is none; the message lists what was tried. Also where the path's module fails to import.
        """
        self._load()
        if name in self._functions:
            return self._functions[name]
        tried = [f"registered names: {', '.join(self.names())}"]
        path = name.replace(":", ".")
        if "." in path:
            found = _import_path(path, tried)
            if found is not None:
                return found
        near = difflib.get_close_matches(name, self.names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "register it with @REWARD_FUNCTIONS.register_module, or give its path."
        raise RewardError(f"no reward function {name!r}. Tried: {'; '.join(tried)}. {hint}")

    def build(self, name: str, **arguments: Any) -> Callable[..., Any]:
        """The function with ``arguments`` bound to it; a class is instantiated with them."""
        function = self.get(name)
        if isinstance(function, type):
            return function(**arguments)
        return functools.partial(function, **arguments) if arguments else function

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._load()
        return sorted(self._functions)

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _load(self) -> None:
        with self._lock:
            if not self._loaded:
                self._loaded = True
                for module in self._built_in:
                    importlib.import_module(module)


def _identity(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _import_path(path: str, tried: list[str]) -> Callable[..., Any] | None:
    """The callable at a dotted path; what did not lead to it is added to ``tried``."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name, attributes = ".".join(parts[:cut]), parts[cut:]
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise RewardError(
                    f"module {module_name} of reward function {path!r} imports {error.name}, which is missing."
                ) from error
            tried.append(f"no module {module_name}")
            continue
        except Exception as error:  # a user's module can fail in any way
            raise RewardError(
                f"module {module_name} of reward function {path!r} fails to import: {error!r}; mend it."
            ) from error
        for attribute in attributes:
            if not hasattr(found, attribute):
                tried.append(f"{module_name} has no {'.'.join(attributes)}")
                return None
            found = getattr(found, attribute)
        if not callable(found):
            tried.append(f"{path} is {type(found).__name__}, which cannot be called")
            return None
        return found
    return None


#: The one registry of reward functions.
REWARD_FUNCTIONS = RewardRegistry(BUILT_IN)
