"""Direct preference optimisation: a model learns from pairs of replies, of which one is preferred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollwright.config.experiment import DPOConfig
from rollwright.errors import DataError
from rollwright.experience.trajectory import Trajectory
from rollwright.trainers.sft import supervised_batch
from rollwright.trainers.supervised import SupervisedTrainer
from rollwright.training.engine import TrainEngine
from rollwright.training.preferences import PreferenceEngine


class DPOTrainer(SupervisedTrainer):
    """Trains a model on rows with ``messages``, ``chosen`` and ``rejected``.

    The reference that it is pulled towards is ``config.ref``, or the model as it was before the first step, also after a resume.
    """

    config: DPOConfig
    model: PreferenceEngine

    def make_engine(self) -> TrainEngine:
        """The model and its reference."""
        engine = PreferenceEngine(self.config.model)
        if self.config.ref is not None:
            engine.load_reference(self.config.ref)
        return engine

    def make_batch(self, rows: Sequence[dict[str, Any]]) -> Trajectory:
        """See :func:`preference_batch`."""
        return preference_batch(rows, self.tokenizer)

    def update(self, batch: Trajectory) -> dict[str, float]:
        """One step of DPO."""
        return self.model.dpo_update(batch, beta=self.config.beta, label_smoothing=self.config.label_smoothing)


def preference_batch(rows: Sequence[dict[str, Any]], tokenizer: Any) -> Trajectory:
    """Rows as pairs: ``input_ids``, ``attention_mask`` and ``loss_mask`` ``[2P, L]``, each preferred reply before the other one.

    Raises:
        DataError: a row is no pair, or has images.
    """
    replies = []
    for row in rows:
        if missing := [key for key in ("messages", "chosen", "rejected") if key not in row]:
            raise DataError(
                f"a preference row has the columns {', '.join(sorted(row))} and lacks {', '.join(missing)}; give the dataset the type "
                "preference."
            )
        if row.get("images"):
            raise DataError("a preference row has images, which this trainer does not give to the model; train on text.")
        replies += [{"messages": row["messages"], "completion": row[key]} for key in ("chosen", "rejected")]
    return supervised_batch(replies, tokenizer)
