"""Weights on their way from a trainer to explorers in other processes: directories, announced in the store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollwright.errors import WeightUpdateError
from rollwright.inference.engine import InferenceEngine, WeightReceiver
from rollwright.inference.weights.audit import NEW_TOKENS_IN_PROCESS, audit, probe_request
from rollwright.inference.weights.files import (
    MANIFEST,
    content_digest,
    keep_newest,
    read_weights,
    remove_later,
    write_weights,
)
from rollwright.inference.weights.ways import distinct_weights
from rollwright.store import Announcement, ExperienceStore
from rollwright.tracking.logging import getLogger
from rollwright.training.logprobs import TokenScorer

logger = getLogger("weights")

ATTEMPTS = 5
FIRST_PAUSE = 0.1  # seconds before weights are looked for again; doubled each time


class PublishedWeights(WeightReceiver):
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

    def update_weights(
        self,
        meta: Any = None,
        *,
        version: int,
        weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        config: Any = None,
    ) -> None:
        """Write and announce weights; on return every explorer that looks finds them.

        Later versions are what a trainer left behind that is gone: they are removed, lest they be kept in the place of these.
        """
        if self.store is None:
            return
        remove_later(self.directory, "v", version)
        path = self.directory / f"v{version:06d}"
        write_weights(path, distinct_weights(weights), version, config=config)
        self.store.publish_version(str(path), version)
        keep_newest(self.directory, "v", self.keep)


def read_published(newest: Announcement) -> dict[str, Tensor]:
    """The weights that were announced, bit for bit.

    Raises:
        WeightUpdateError: they are gone, damaged, or not those that the trainer wrote as this version.
    """
    weights = dict(read_weights(newest.path))
    try:
        manifest = json.loads((Path(newest.path) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightUpdateError(f"{newest.path} does not say what it holds ({error}); publish the weights again.") from error
    if manifest["version"] != newest.version:
        raise WeightUpdateError(f"{newest.path} holds version {manifest['version']}, not {newest.version}.")
    if content_digest(weights.items()) != manifest["digest"]:
        raise WeightUpdateError(
            f"The weights in {newest.path} are not those that the trainer wrote there: they were damaged or changed. Check the disk."
        )
    return weights


def newest_weights(store: ExperienceStore, loaded: Announcement | None) -> tuple[Announcement, dict[str, Tensor]] | None:
    """The announcement and the weights that are newest; None where they are those that are loaded, or there are none.

    What is removed or replaced while it is read (a newer version came, a trainer began again) is looked for again.

    Raises:
        WeightUpdateError: they cannot be read, again and again.
    """
    for attempt in range(ATTEMPTS):
        newest = store.latest_version()
        if newest is None or newest.names_weights_of(loaded):
            return None
        try:
            return newest, read_published(newest)
        except WeightUpdateError as error:
            if attempt == ATTEMPTS - 1:
                raise
            logger.info("version %d could not be read (%s); looking again", newest.version, error)
            time.sleep(FIRST_PAUSE * 2**attempt)
    raise AssertionError("unreachable")


def give_weights(rollout: InferenceEngine, weights: Mapping[str, Tensor], version: int, tolerance: float | None) -> None:
    """Have an engine sample with published weights from the next token on, and see that it does.

    An engine in this process samples a probe, whose log-probabilities are compared with those of its model's plain forward pass.
    (What servers sample is compared by the trainer, batch by batch.)

    Args:
        rollout: the engine.
        weights: from ``read_published``.
        version: of the weights.
        tolerance: largest mean difference; None: what the weights' type allows.

    Raises:
        WeightUpdateError: the engine does not compute with them; it stays paused.
    """
    rollout.pause()
    rollout.update_weights(version=version, weights=weights)
    model = rollout.local_model
    if model is not None:
        answers = rollout.probe(probe_request(model, NEW_TOKENS_IN_PROCESS)) or {}
        dtype = next(model.parameters()).dtype
        audit(answers, lambda ids_BL, temperature: _plain_logprobs(model, ids_BL, temperature), version, tolerance, dtype)
    rollout.resume()


@torch.no_grad()
def _plain_logprobs(model: torch.nn.Module, ids_BL: Tensor, temperature: float) -> Tensor:
    """Log-probabilities ``[B, L]`` of tokens by the model's own forward pass."""
    ids_BL = ids_BL.to(next(model.parameters()).device)
    wanted_BL = torch.ones_like(ids_BL, dtype=torch.bool)
    wanted_BL[:, 0] = False
    temperature_B = torch.full((len(ids_BL),), temperature, device=ids_BL.device)
    batch = {"input_ids": ids_BL, "attention_mask": torch.ones_like(wanted_BL), "temperature": temperature_B}
    logprobs_BL, _ = TokenScorer(model)(batch, wanted_BL)
    return logprobs_BL
