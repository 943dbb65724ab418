"""How one episode goes: base classes, the registry, built-in workflows, Task, the model wrapper.

Every workflow that ``rollwright`` exports is importable from here too. A workflow that is contributed to the project registers where
this module imports it.
"""

from typing import Any

import rollwright


def __getattr__(name: str) -> Any:
    if name not in rollwright.__all__:  # pyright: ignore[reportAttributeAccessIssue] - not in the stub
        raise AttributeError(f"module {__name__!r} has no name {name!r}")
    return getattr(rollwright, name)
