"""The registry of reward functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rollwright.errors import RewardError
from rollwright.registry import Registry


class RewardRegistry(Registry[Callable[..., Any]]):
    """Names of reward functions. Users add theirs with ``@REWARD_FUNCTIONS.register_module("name")``.

    Marks may be given with the name. ``runs_inline=True`` promises that the function is pure, quick and bounded in time and
    memory whatever the completion holds; it is then called directly instead of in a worker process. ``worker_imports`` names
    modules that the function imports when called; a worker imports them before the call's time begins. ``uses_sandbox=True`` says
    that it calls ``run_python``: a run whose sandbox is missing then stops before it starts.
    """

    def build(self, name: str, /, **arguments: Any) -> Callable[..., Any]:
        """The function with ``arguments`` bound to it; a class is instantiated with them."""
        function = self.get(name)
        if isinstance(function, type):
            return function(**arguments)
        return functools.partial(function, **arguments) if arguments else function


_BUILT_IN = {
    "rollwright.rewards.numbers": ("numeric", "gsm8k", "arithmetic"),
    "rollwright.rewards.text": ("exact_match", "f1", "format", "countdown"),
    "rollwright.rewards.math": ("accuracy", "math", "math_boxed", "math_dapo"),
}

#: The one registry of reward functions.
REWARD_FUNCTIONS = RewardRegistry(
    "reward function",
    RewardError,
    variable="REWARD_FUNCTIONS",
    built_in={f"{name}_reward": f"{module}:{name}_reward" for module, names in _BUILT_IN.items() for name in names},
    marks=("runs_inline", "worker_imports", "uses_sandbox"),
)
