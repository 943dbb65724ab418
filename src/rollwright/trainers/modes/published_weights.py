"""Transfer of weights from a trainer to explorers, in directories that are announced in the store.

The trainer writes and announces each version (``PublishedWeights``). Explorers and services load the newest one (``WeightFollower``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollwright.errors import WeightUpdateError
from rollwright.experience.trajectory import tensor_container_to
from rollwright.inference.engine import InferenceEngine, WeightReceiver
from rollwright.inference.request import ModelResponse
from rollwright.inference.weights.files import (
    MANIFEST,
    content_digest,
    keep_newest,
    read_stream,
    remove_later,
    write_weights,
)
from rollwright.inference.weights.stream import WeightStream
from rollwright.rollout.engines import RolloutEngine
from rollwright.tracking.logging import getLogger
from rollwright.training.adapters import with_adapter
from rollwright.training.logprobs import TokenScorer
from rollwright.training.micro_batches import attended_tokens
from rollwright.training.publish_and_audit import NEW_TOKENS_IN_PROCESS, answer_rows, audit, probe_request

if TYPE_CHECKING:  # supervised training needs no store
    from rollwright.store.announcements import Announcement, Announcements

logger = getLogger("weights")

ATTEMPTS = 5
FIRST_PAUSE = 0.1  # seconds before the second attempt to read weights; doubled each time


class PublishedWeights(WeightReceiver):
    """Replaces an actor's inference engine: writes published weights to ``directory/v…`` and announces them.

    Args:
        directory: a directory that explorers see under the same path.
        announcements: announcements of the store. If None, no weights are written, because nobody samples.
        keep: number of versions to keep. If a version is removed while an explorer reads it, the explorer reads the newest instead.
    """

    def __init__(self, directory: Path, announcements: Announcements | None, keep: int = 3) -> None:
        self.directory = directory.absolute()
        self.announcements = announcements
        self.keep = keep

    def receive_weights(self, weights: WeightStream, version: int, meta: Any, config: Any) -> None:
        """Write and announce weights.

        Later versions that an earlier trainer left behind are removed first; otherwise ``keep`` would prefer them to these weights.
        """
        if self.announcements is None:
            return
        remove_later(self.directory, "v", version)
        path = self.directory / f"v{version:06d}"
        write_weights(path, weights, version, config=config)
        self.announcements.publish(str(path), version)
        keep_newest(self.directory, "v", self.keep)


def read_published(newest: Announcement) -> WeightStream:
    """Read announced weights.

    Raises:
        WeightUpdateError: the weights are missing, damaged, or not those that the trainer wrote as this version.
    """
    weights = read_stream(newest.path)
    try:
        manifest = json.loads((Path(newest.path) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightUpdateError(f"{newest.path} does not say what it holds ({error}); publish the weights again.") from error
    if manifest["version"] != newest.version:
        raise WeightUpdateError(f"{newest.path} holds version {manifest['version']}, not {newest.version}.")
    if content_digest(weights) != manifest["digest"]:
        raise WeightUpdateError(
            f"The weights in {newest.path} are not those that the trainer wrote there: they were damaged or changed. Check the disk."
        )
    return weights


def newest_weights(announcements: Announcements, loaded: Announcement | None) -> tuple[Announcement, WeightStream] | None:
    """Return the newest announcement and its weights, or None if they are already loaded or nothing was announced.

    A newer version or a restarted trainer may replace the files while they are read; the newest announcement is then read again.

    Raises:
        WeightUpdateError: the weights could not be read in ``ATTEMPTS`` attempts.
    """
    pauses = [FIRST_PAUSE * 2**attempt for attempt in range(ATTEMPTS - 1)]
    while (newest := announcements.newest()) is not None and not newest.names_weights_of(loaded):
        try:
            return newest, read_published(newest)
        except WeightUpdateError as error:
            if not pauses:
                raise
            logger.info("version %d could not be read (%s); looking again", newest.version, error)
            time.sleep(pauses.pop(0))
    return None


class WeightFollower:
    """Keeps an engine at the weights that the trainer announced last.

    Args:
        rollout: the engine.
        announcements: announcements of the store.
        tolerance: see :func:`load_and_audit`.
        before_going_back: called before the engine goes back to earlier weights, which ends running requests. If None, running
            requests finish with the weights that they began with, and only later requests get the earlier weights.

    Attributes:
        loaded: announcement of the loaded weights. None if no weights have been loaded.
    """

    def __init__(
        self,
        rollout: RolloutEngine,
        announcements: Announcements,
        tolerance: float | None,
        before_going_back: Callable[[], object] | None = None,
    ) -> None:
        self._rollout = rollout
        self._announcements = announcements
        self._tolerance = tolerance
        self._before_going_back = before_going_back
        self.loaded: Announcement | None = None

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""
        return 0 if self.loaded is None else self.loaded.version

    def follow(self) -> bool:
        """Load the newest weights, even between the tokens of a request. Returns False if they are already loaded.

        If the trainer went back to an earlier version, so does the engine, at once. (Servers end running requests.)
        """
        found = newest_weights(self._announcements, self.loaded)
        if found is None:
            return False
        newest, weights = found
        if newest.takes_back(self.loaded):
            logger.warning("the trainer went back behind version %d, and is at %d", self.version, newest.version)
            if self._before_going_back is not None:
                self._before_going_back()
        if newest.version < self._rollout.get_version():
            self._rollout.client.go_back(newest.version, finish=self._before_going_back is None)
        load_and_audit(self._rollout, weights, newest.version, self._tolerance)
        logger.info("version %d samples now", newest.version)
        self.loaded = newest
        return True


def load_and_audit(
    rollout: InferenceEngine, weights: WeightStream | Mapping[str, Tensor], version: int, tolerance: float | None
) -> None:
    """Load published weights into an engine, and check that it samples the next token with them.

    An engine in this process samples a probe, and its log-probabilities are compared with those of the model's own forward pass.
    For servers, the trainer compares the log-probabilities of every batch.

    Args:
        rollout: the engine.
        weights: the weights, by name, or an adapter of the engine's model.
        version: version of the weights.
        tolerance: largest mean difference of log-probabilities. If None, it depends on the type of the weights.

    Raises:
        WeightUpdateError: the engine does not compute with the weights; it stays paused.
    """
    rollout.pause()
    weights = WeightStream.of(weights)
    rollout.update_weights(version=version, weights=weights)
    if (model := rollout.sampler.local_model) is not None:
        answers = rollout.sampler.probe(probe_request(model, NEW_TOKENS_IN_PROCESS)) or {}
        dtype = next(model.parameters()).dtype
        plain = model if weights.adapter is None else with_adapter(model, weights)
        audit(answers, lambda answer: _plain_logprobs(plain, answer), version, tolerance, dtype)
    rollout.resume()


@torch.no_grad()
def _plain_logprobs(model: torch.nn.Module, answer: ModelResponse) -> Tensor:
    """Compute the log-probabilities ``[1, L]`` of an answer's prompt and tokens with the model's own forward pass."""
    batch, _ = answer_rows([answer])
    batch = tensor_container_to(batch, next(model.parameters()).device)
    return TokenScorer(model)(batch, attended_tokens(batch))[0]
