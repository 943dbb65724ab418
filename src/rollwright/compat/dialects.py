"""Other systems whose config files and key names are understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rollwright.compat.trinity import Trinity
from rollwright.config.source import ConfigDialect


class AReaL(ConfigDialect):
    """AReaL's keys. Its files have this project's shape, so only names differ."""

    system: ClassVar[str] = "AReaL"
    #: Only names whose meaning is the same.
    renamed: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "IntervalConfig": {"freq_steps": "every_steps", "freq_epochs": "every_epochs", "freq_secs": "every_seconds"},
        "RolloutConfig": {"max_concurrent_rollouts": "max_concurrent_samples"},
    }


DIALECTS: tuple[type[ConfigDialect], ...] = (AReaL, Trinity)
