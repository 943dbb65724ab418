"""Everything a run can be configured with: dataclasses, read from YAML and overrides, validated by pydantic. No torch.

``source`` reads a file; ``overrides`` applies ``key=value`` arguments; ``interpolation`` resolves ``${…}``; ``validation`` builds the
dataclasses, and ``schema`` their JSON Schema; ``rules`` is the table of rejected combinations, and ``faults`` applies it; ``plan``
describes what stages do; ``loading`` is the pipeline. A field has ``metadata={"help": ..., "ge": ..., "le": ..., "choices": ...,
"registry": ...}``. An unknown key is an error that suggests the nearest known name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, TypeVar

Value = TypeVar("Value")


def key(default: Value, text: str, **limits: Any) -> Value:
    """Make a dataclass field with a default, a help text and further metadata, such as ``ge`` or ``choices``."""
    return field(default=default, metadata={"help": text, **limits})


def key_from(factory: Callable[[], Value], text: str, **limits: Any) -> Value:
    """Make a field like :func:`key`, whose default is created by ``factory`` for each instance."""
    return field(default_factory=factory, metadata={"help": text, **limits})
