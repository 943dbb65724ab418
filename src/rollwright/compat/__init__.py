"""Names, keys and files of other systems; no other package knows them.

``trinity`` and ``AReaL`` translate files: ``config`` finds them in ``DIALECTS``. ``foreign_keys`` and ``replacements`` are tables for
hints in messages. The other files hold public names that only ported code uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rollwright.config.source import ConfigDialect


class AReaL(ConfigDialect):
    """AReaL's keys. Its files have this project's shape, so only names differ."""

    system: ClassVar[str] = "AReaL"
    #: Only names whose meaning is the same.
    renamed: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "IntervalConfig": {"freq_steps": "every_steps", "freq_epochs": "every_epochs", "freq_secs": "every_seconds"},
        "RolloutConfig": {"max_concurrent_rollouts": "max_concurrent_samples"},
    }


#: Top-level packages whose names ``rollwright`` provides itself.
PACKAGES = ("areal", "trinity", "sequence_processing", "rlp_datasets", "rlp_sequence_processing")
#: Extras for ported files, and what each is for.
EXTRAS = {"areal": "workflows from AReaL"}
#: Import name of a package that ported files need -> what to install.
PIP_NAMES = {"aiofiles": "'rollwright[areal]'"}
#: What to add to a description of the KL to the reference.
KL_NOTE = "; AReaL's kl_ctl takes it from the reward instead (docs/coming-from.md)"
