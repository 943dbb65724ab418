"""Rewards in named parts: classes whose call returns a dict of numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollwright.errors import RewardError


class RewardFn:
    """Base class of rewards with named parts: a call returns the parts by name, and their sum is the reward.

    A subclass takes ``reward_fn_args`` in its constructor; its call takes ``response``, ``truth`` and any other parameters. A workflow may
    call it directly. If a taskset or a config names it, it is called with the completion, the prompt, the task's answer and the columns
    that it has parameters for.
    """

    def __init__(self, **_: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        """The parts by name."""
        raise RewardError(
            f"{type(self).__name__} defines no __call__(self, response, truth=None, …) that returns the parts by name."
        )


class SummedParts:
    """Adapts a ``RewardFn`` to a reward function ``(prompt, completion, prompt_ids, completion_ids, *, answer, **columns)``."""

    def __init__(self, parts: RewardFn) -> None:
        self.parts = parts
        self.__qualname__, self.__module__ = (
            type(parts).__qualname__,
            type(parts).__module__,
        )  # for messages
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
    ) -> float:
        """The sum of the parts."""
        known = {"response": completion, "prompt": prompt, "truth": answer}
        given = {name: value for name, value in {**columns, **known}.items() if self._takes_all or name in self._takes}
        return sum_of_parts(self.parts(**given), type(self.parts).__name__)


def sum_of_parts(parts: Any, name: str) -> float:
    """Sum the parts that a class returned.

    Raises:
        RewardError: they are not a dict of numbers.
    """
    if not isinstance(parts, Mapping) or not all(isinstance(part, int | float) for part in parts.values()):
        raise RewardError(f"{name} returned {parts!r:.80}; a RewardFn returns a dict of numbers, whose sum is the reward.")
    return float(sum(parts.values()))


def in_parts(function: Any, arguments: Mapping[str, Any]) -> Callable[..., dict[str, float]]:
    """Build the callable for ``self.reward_fn(response=…, truth=…)`` of a workflow.

    Args:
        function: a ``RewardFn`` or its class; or a reward function, which returns one part.
        arguments: ``reward_fn_args``.
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
