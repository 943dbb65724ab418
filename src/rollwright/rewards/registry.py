"""The registry of reward functions, and rewards in named parts: callable classes that return a dict of numbers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollwright.errors import RewardError
from rollwright.registry import Registry
from rollwright.rewards.score import Score


class RewardRegistry(Registry[Callable[..., Any]]):
    """Registry of reward functions. Users add functions with ``@REWARD_FUNCTIONS.register_module("name")``.

    The decorator also accepts these arguments:

    * ``runs_inline=True`` declares that the function is pure and fast, and bounded in time and memory for any completion. The function is
      then called directly instead of in a worker process.
    * ``worker_imports`` names modules that the function imports when it is called. A worker imports them before the time limit starts.
    * ``uses_sandbox=True`` declares that the function calls ``run_python``, so a run whose sandbox is missing stops before it starts.

    A URL is a name, too: that of the reward function that a service computes (``rewards.http``).
    """

    def get(self, name: str) -> Callable[..., Any]:
        """Return the entry of a name or an import path (see ``Registry.get``), or the reward function of a URL."""
        if name.startswith(("http://", "https://")):
            from rollwright.rewards.http import reward_at

            return reward_at(name)
        return super().get(name)

    def build(self, name: str, /, **arguments: Any) -> Callable[..., Any]:
        """Return the function registered as ``name`` with ``arguments`` bound to it; a class is instantiated with them."""
        function = self.get(name)
        if isinstance(function, type):
            return function(**arguments)
        return functools.partial(function, **arguments) if arguments else function


_BUILT_IN = {
    "rollwright.rewards.numbers": ("numeric", "gsm8k", "arithmetic"),
    "rollwright.rewards.text": ("exact_match", "f1", "format", "countdown"),
    "rollwright.rewards.math": ("accuracy", "math", "math_boxed", "math_dapo"),
}

#: The registry of reward functions.
REWARD_FUNCTIONS = RewardRegistry(
    "reward function",
    RewardError,
    variable="REWARD_FUNCTIONS",
    built_in={f"{name}_reward": f"{module}:{name}_reward" for module, names in _BUILT_IN.items() for name in names},
    marks=("runs_inline", "worker_imports", "uses_sandbox"),
)


class RewardFn:
    """Base class of rewards that have named parts: a call returns the parts by name, and their sum is the reward.

    The constructor of a subclass gets ``reward_fn_args``; its ``__call__`` has the parameters ``response``, ``truth`` and any others. A
    workflow may call an instance directly. If a taskset or a config names the class, an instance is called with the completion, the prompt,
    the task's answer and the task's columns, as far as it has parameters for them.
    """

    def __init__(self, **_: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        """Return the parts by name."""
        raise RewardError(
            f"{type(self).__name__} defines no __call__(self, response, truth=None, …) that returns the parts by name."
        )


class SummedParts:
    """A ``RewardFn`` as a reward function ``(prompt, completion, prompt_ids, completion_ids, *, answer, **columns)``."""

    def __init__(self, parts: RewardFn) -> None:
        self.parts = parts
        self.__qualname__, self.__module__ = type(parts).__qualname__, type(parts).__module__  # for messages
        parameters = inspect.signature(parts).parameters.values()
        self._takes = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)

    def __call__(
        self,
        prompt: str,
        completion: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        *,
        answer: Any = None,
        **columns: Any,
    ) -> Score:
        """Return the sum of the parts.

        Raises:
            RewardError: the parts are not a dict of numbers.
        """
        known = {**columns, "response": completion, "prompt": prompt, "truth": answer}
        parts: Any = self.parts(**{name: value for name, value in known.items() if self._takes_all or name in self._takes})
        if not isinstance(parts, Mapping) or not all(isinstance(part, int | float) for part in parts.values()):
            raise RewardError(
                f"{type(self.parts).__name__} returned {parts!r:.80}; a RewardFn returns a dict of numbers, whose sum is the reward."
            )
        return Score(float(sum(parts.values())), {str(name): float(part) for name, part in parts.items()})


def in_parts(function: Any, arguments: Mapping[str, Any]) -> Callable[..., dict[str, float]]:
    """Build the callable for ``self.reward_fn(response=…, truth=…)`` of a workflow.

    Args:
        function: a ``RewardFn`` or its class; or a reward function, whose value becomes the only part.
        arguments: ``reward_fn_args`` of the taskset.
    """
    if isinstance(function, type) and issubclass(function, RewardFn):
        return function(**arguments)
    if isinstance(function, RewardFn):
        return function

    def called(response: str, truth: Any = None, prompt: str = "", **columns: Any) -> dict[str, float]:
        value = function(prompt or "", response, [], [], **{**columns, "answer": truth, **arguments})
        if inspect.isawaitable(value):
            if inspect.iscoroutine(value):
                value.close()
            raise RewardError(
                "self.reward_fn(…) is called without await, and the reward function is async: await self.score(experience)."
            )
        return {"reward": float(value)}

    return called
