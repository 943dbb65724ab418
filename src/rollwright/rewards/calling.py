"""How a reward function is called: ``(prompt, completion, prompt_ids, completion_ids, **columns)``.

The first four are positional, whatever the function calls them. The task's other columns are keywords, except those whose
name is one of the function's first four parameters; a function without ``**kwargs`` gets only those it has parameters for.
A parameter named ``data`` receives the whole row as a dict, with the columns that were left out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rollwright.errors import RewardError

#: What every reward function is handed first, by position.
POSITIONAL = ("prompt", "completion", "prompt_ids", "completion_ids")
#: Columns that name a task, for messages, best first.
TASK_COLUMNS = ("ordinal", "task_id", "query_id", "id", "index")


def function_name(function: Any) -> str:
    """Module and qualified name, as far as the function has them."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    module = getattr(inner, "__module__", None) or type(inner).__module__
    return f"{module}.{name}"


def task_name(prompt: Any, data: dict[str, Any]) -> str:
    """How messages call the task: its ordinal or id, else the beginning of its prompt."""
    for column in TASK_COLUMNS:
        if isinstance(data.get(column), int | str):
            return f"{column} {data[column]}"
    return f"with prompt {str(prompt)[:80]!r}"


def runs_inline(function: Any) -> bool:
    """True where the function promises to be pure, quick and bounded, so that it needs no worker."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "runs_inline", False) is True


def is_async(function: Any) -> bool:
    """True for coroutine functions, partials of them and objects whose ``__call__`` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):
        return False
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class CallShape:
    """What of a task's row a function receives as keywords."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function_name(function)
        self._keywords: set[str] = set()
        self._required: set[str] = set()
        self._positional: set[str] = set()
        self._takes_all = True
        self._wants_data = False
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # builtins without a signature take what they get
            return
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        takes_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        if len(positional) < len(POSITIONAL) and not takes_rest:
            raise RewardError(
                f"reward function {self.name}{inspect.signature(function)} takes {len(positional)} positional arguments; "
                f"reward functions are called as ({', '.join(POSITIONAL)}, **columns): give it these four parameters first."
            )
        self._positional = {p.name for p in positional[: len(POSITIONAL)] if p.kind is p.POSITIONAL_OR_KEYWORD}
        rest = [p for p in positional[len(POSITIONAL) :] if p.kind is p.POSITIONAL_OR_KEYWORD]
        rest += [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._keywords = {p.name for p in rest}
        self._required = {p.name for p in rest if p.default is p.empty} - {"data"}
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._wants_data = "data" in self._keywords

    def keywords(self, data: dict[str, Any]) -> dict[str, Any]:
        """The keywords for one row.

        Raises:
            RewardError: the function requires a column that the row has not.
        """
        if missing := sorted(self._required - data.keys()):
            raise RewardError(
                f"reward function {self.name} needs {', '.join(missing)}, but the task has the columns "
                f"{', '.join(sorted(map(str, data))) or 'none'}; rename the column or give the parameter a default."
            )
        if self._takes_all:
            out = {key: value for key, value in data.items() if key not in self._positional}
        else:
            out = {key: value for key, value in data.items() if key in self._keywords}
        if self._wants_data:
            out["data"] = data
        return out
