"""Keys that users bring from other systems' files: read with a warning that tells the name used here."""

from __future__ import annotations

from rollwright.config.sections import IntervalConfig, RolloutConfig

#: Section -> (the name in the user's file -> the field it means). Only names whose meaning is the same stand here.
LEGACY_KEYS: dict[type, dict[str, str]] = {
    IntervalConfig: {"freq_steps": "every_steps", "freq_epochs": "every_epochs", "freq_secs": "every_seconds"},
    RolloutConfig: {"max_concurrent_rollouts": "max_concurrent_samples"},
}
