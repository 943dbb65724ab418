"""Filling in what a workflow's constructor takes and the user left to the config."""

from __future__ import annotations

import inspect
from typing import Any

from rollwright.workflows.registry import WORKFLOWS


def with_defaults(workflow: Any, kwargs: dict[str, Any] | None, defaults: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` and those ``defaults`` that the constructor takes, are not None and are not given.

    Args:
        workflow: class, import string or registered name; an instance is built already, so its kwargs stay as they are.
        kwargs: what the user gave.
        defaults: values by parameter name.
    """
    given = dict(kwargs or {})
    target = WORKFLOWS.get(workflow) if isinstance(workflow, str) else workflow
    if not inspect.isclass(target):
        return given
    parameters = inspect.signature(target).parameters
    fills = {name: value for name, value in defaults.items() if name in parameters and value is not None}
    return {**fills, **given}
