"""Weights on their way from a trainer to explorers in other processes: directories, announced in the store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rollwright.experience.store import ExperienceStore
from rollwright.inference.weight_files import keep_newest, remove_later, write_weights
from rollwright.inference.weights import distinct_weights


class PublishedWeights:
    """Stands where an actor's inference engine stands: what is published is written to ``directory/v…`` and announced.

    Args:
        directory: which the explorers see under the same name.
        store: where versions are announced; None: nobody samples, so nothing is written.
        keep: versions kept; an explorer that reads one while it is removed reads the newest instead.
    """

    def __init__(self, directory: Path, store: ExperienceStore | None, keep: int = 3) -> None:
        self.directory = directory.absolute()
        self.store = store
        self.keep = keep

    def update_weights(self, meta: Any, *, version: int, weights: Mapping[str, Tensor], trainer: Any) -> None:
        """Write and announce weights; on return every explorer that looks finds them.

        Later versions are what a trainer left behind that is gone: they are removed, lest they be kept in the place of these.
        """
        if self.store is None:
            return
        remove_later(self.directory, "v", version)
        path = self.directory / f"v{version:06d}"
        write_weights(path, distinct_weights(weights), version, config=trainer.model.config)
        self.store.publish_version(str(path), version)
        keep_newest(self.directory, "v", self.keep)
