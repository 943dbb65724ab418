"""Supervised training on worked completions, until the end or until it is accurate enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollwright.config.experiment import SFTConfig
from rollwright.data.vision import as_images, image_placeholder, load_processor, multi_modal_outputs, place_images
from rollwright.errors import DataError
from rollwright.experience.contract import MULTI_MODAL
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.supervised import SupervisedTrainer
from rollwright.training.engine import TrainEngine
from rollwright.workflows.branched_sequence import BranchedSequence


class SFTTrainer(SupervisedTrainer):
    """Trains a model on rows with ``messages`` and ``completion``; the loss is on the completion and the end token.

    Args:
        config: the experiment.
        train_dataset: rows as :func:`supervised_batch` takes them.
        valid_dataset: tasks that stop the training; a split of their own.
        directory: where the run writes; claimed by the caller.
    """

    def __init__(
        self,
        config: SFTConfig,
        train_dataset: Sequence[dict[str, Any]],
        valid_dataset: Sequence[dict[str, Any]] | None = None,
        *,
        directory: RunDirectory,
    ) -> None:
        super().__init__(config, train_dataset, valid_dataset, directory=directory)
        self.processor = None
        if any(row.get("images") for row in train_dataset[:1]):
            self.processor = load_processor(config.tokenizer_path or config.model.path, self.tokenizer)

    def make_engine(self) -> TrainEngine:
        """The model."""
        return TrainEngine(self.config.model)

    def make_batch(self, rows: Sequence[dict[str, Any]]) -> Trajectory:
        """See :func:`supervised_batch`."""
        return supervised_batch(rows, self.tokenizer, self.processor)

    def update(self, batch: Trajectory) -> dict[str, float]:
        """The mean negative log-likelihood of the completions' tokens."""
        return self.model.sft_update(batch)


def supervised_batch(rows: Sequence[dict[str, Any]], tokenizer: Any, processor: Any = None) -> Trajectory:
    """Rows with ``messages`` and ``completion`` as a batch: ``input_ids``, ``attention_mask``, ``loss_mask`` ``[B, L]``.

    Rows with ``images`` need the model's ``processor``; then the batch has ``multi_modal_inputs``, too.

    A row may instead carry ``input_ids`` and ``loss_mask``, or ``segments``: a worked episode of several turns as
    ``[{"text": str, "train": bool}]``, in which ``"branch": n`` (1, 2, …) puts a segment on an isolated branch that begins
    where the segments before the first branch ended. The end token follows the completion and is learned.

    Raises:
        DataError: a row lacks the columns.
    """
    return concat_padded_tensors([_encode(row, tokenizer, processor) for row in rows])


def _encode(row: dict[str, Any], tokenizer: Any, processor: Any = None) -> Trajectory:
    seen: dict[str, Any] = {}
    layout: dict[str, torch.Tensor] = {}
    if "input_ids" in row and "loss_mask" in row:
        ids, mask = list(row["input_ids"]), list(row["loss_mask"])
    elif "segments" in row:
        ids, mask, layout = _joined(row["segments"], tokenizer)
    elif "messages" in row and "completion" in row:
        if processor is None:
            prompt = tokenizer.apply_chat_template(row["messages"], tokenize=True, add_generation_prompt=True)
        else:
            prompt, seen = _seen_prompt(row, tokenizer, processor)
        completion = [*tokenizer.encode(row["completion"], add_special_tokens=False), tokenizer.eos_token_id]
        ids, mask = [*prompt, *completion], [0] * len(prompt) + [1] * len(completion)
    else:
        raise DataError(
            f"a row for supervised training has the columns {', '.join(sorted(row))}; it needs messages and completion, "
            "segments, or input_ids and loss_mask."
        )
    encoded = {
        "input_ids": torch.tensor([ids], dtype=torch.long),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
        "loss_mask": torch.tensor([mask], dtype=torch.long),
        **layout,
    }
    return encoded if processor is None else {**encoded, MULTI_MODAL: [seen or None]}


def _joined(segments: Sequence[dict[str, Any]], tokenizer: Any) -> tuple[list[int], list[int], dict[str, torch.Tensor]]:
    """Ids, loss mask and, where segments name branches, the layout of a worked episode: ``[{"text", "train", "branch"}]``."""
    sequence = BranchedSequence([], isolated=any("branch" in part for part in segments))
    mask: list[int] = []
    current = 0
    for part in segments:
        if (branch := part.get("branch", 0)) != current:
            current = branch
            sequence.open_branch() if branch else sequence.close_branches()
        ids = tokenizer.encode(part["text"], add_special_tokens=False)
        sequence.append_context(ids)
        mask += [int(part["train"])] * len(ids)
    return sequence.input_ids, mask, {name: torch.tensor([ids]) for name, ids in sequence.layout().items()}


def _seen_prompt(row: dict[str, Any], tokenizer: Any, processor: Any) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Prompt ids with every image token, and what the model takes of the images; as ``VisionRLVRWorkflow`` makes them."""
    images = as_images(row.get("images") or [])
    messages = place_images(row["messages"], len(images), image_placeholder(processor))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    processed = processor(images=images or None, text=text, padding=False, return_tensors="pt")
    return processed["input_ids"][0].tolist(), multi_modal_outputs(processed) if images else {}
