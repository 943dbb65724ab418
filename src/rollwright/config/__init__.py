"""Everything a run can be configured with: dataclasses, read from YAML and overrides, validated by pydantic. No torch.

``source`` reads a file and merges ``key=value`` overrides; ``interpolation`` resolves ``${…}``; ``validation`` makes the
dataclasses, ``schema`` their JSON Schema; ``rules`` is the table of combinations that are refused, and ``faults`` walks it; ``plan``
describes what stages do; ``loading`` is the pipeline. A field carries ``metadata={"help": ..., "ge": ..., "le": ..., "choices": ...,
"registry": ...}``. An unknown key is refused with the nearest known name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, TypeVar

Value = TypeVar("Value")


def key(default: Value, text: str, **limits: Any) -> Value:
    """A field with its default, its help and further metadata, such as ``ge`` or ``choices``."""
    return field(default=default, metadata={"help": text, **limits})


def key_from(factory: Callable[[], Value], text: str, **limits: Any) -> Value:
    """A field whose default is made by ``factory`` for each instance; otherwise as :func:`key`."""
    return field(default_factory=factory, metadata={"help": text, **limits})
