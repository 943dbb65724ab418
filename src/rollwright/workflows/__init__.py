"""Workflows, the code of episodes: base classes, the registry, built-in workflows, ``Task`` and the model wrapper.

Every workflow that ``rollwright`` exports can also be imported from this package.
"""

from typing import Any

import rollwright


def __getattr__(name: str) -> Any:
    if name not in rollwright.__all__:  # pyright: ignore[reportAttributeAccessIssue] - not in the stub
        raise AttributeError(f"module {__name__!r} has no name {name!r}")
    return getattr(rollwright, name)
