"""Training on datasets without sampling: supervised fine-tuning (SFT) on completions, and DPO on pairs of replies."""

from __future__ import annotations

import asyncio
import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch

from rollwright.config.experiment import DPOConfig, FinetuneSpec, SFTConfig
from rollwright.data.chat_template import prompt_ids, prompt_text, reply_ids, without_template
from rollwright.data.conversation import worked_turns
from rollwright.data.vision import as_images, image_placeholder, load_processor, multi_modal_outputs, place_images
from rollwright.errors import ConfigError, DataError
from rollwright.experience.contract import MULTI_MODAL
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors
from rollwright.inference.engine import run_concurrently
from rollwright.placement.local_rollout import copy_to_sample, make_local_engine
from rollwright.placement.teachers import open_teachers
from rollwright.rollout.engines import RolloutEngine
from rollwright.rollout.teachers import Teachers
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.drawn_tasks import task_loader, with_defaults, workflow_arguments
from rollwright.trainers.loops.evaluation import EvaluationResult, evaluate
from rollwright.trainers.loops.loop import Part, StopSignal, Trainer
from rollwright.trainers.loops.reporting import StageRun
from rollwright.trainers.modes.published_weights import load_and_audit
from rollwright.training.publish_and_audit import Publisher, publisher_for
from rollwright.workflows.turns import BranchedSequence

#: Columns of rows that do not need the tokenizer's chat template: episodes in segments, tokens, and images (rendered by the processor).
_WITHOUT_TEMPLATE = ("segments", "input_ids", "images")


class SupervisedTrainer(Trainer):
    """Trains a model on rows until the last step, or until a workflow's mean reward on ``valid_dataset`` reaches ``stop_accuracy``.

    Subclasses define batches and updates.

    Args:
        config: the experiment.
        train_dataset: the rows.
        valid_dataset: held-out tasks, whose evaluation decides when to stop.
        directory: directory of the run, claimed by the caller.
    """

    curve = "loss"
    trained_part = "model"

    def __init__(
        self,
        config: SFTConfig,
        train_dataset: Sequence[dict[str, Any]],
        valid_dataset: Sequence[dict[str, Any]] | None = None,
        *,
        directory: RunDirectory,
    ) -> None:
        if config.stop_accuracy is not None and not (valid_dataset and config.workflow and config.evaluator.every_steps):
            raise ConfigError("stop_accuracy needs valid_dataset, workflow and evaluator.every_steps to be set as well.")
        super().__init__(config, config.model, directory)
        if self.tokenizer.chat_template is None and any(row.keys().isdisjoint(_WITHOUT_TEMPLATE) for row in train_dataset):
            raise ConfigError(f"the rows are conversations, and {without_template(self.tokenizer)}")
        self.valid_dataset = list(valid_dataset or [])[: config.evaluator.limit]
        self.evaluates = self.shares_weights = bool(config.workflow and self.valid_dataset)
        self.loader = task_loader(config, train_dataset)
        self.spec = FinetuneSpec(
            config.total_train_epochs, len(train_dataset), config.train_dataset.batch_size, config.total_train_steps
        )

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template, from ``train_dataset.format``."""
        return self.config.train_dataset.columns.template_variables

    @abstractmethod
    def make_batch(self, rows: Sequence[dict[str, Any]]) -> Trajectory:
        """Convert rows to a batch."""

    @abstractmethod
    def update(self, batch: Trajectory) -> dict[str, float]:
        """Take one step on all ranks, and return metrics that include ``loss``."""

    def open(self, opened: ExitStack) -> None:
        """Start the engine that evaluates the model, if there are held-out tasks."""
        self.model: Any = self.trained
        self.rollout: RolloutEngine | None = None
        self.weights: Publisher | None = None
        if self.evaluates:
            model = self.ranks.model if self.ranks.model is not None else copy_to_sample(self.config.model)
            self.rollout = rollout = make_local_engine(self.config, model, self.tokenizer)
            opened.callback(rollout.destroy)
            rollout.initialize()
            self.weights = publisher_for(self.model, rollout, None) if self.ranks.model is not None else None

    def parts(self) -> dict[str, Part]:
        """Return the loader, which holds the order of the rows."""
        return {"loader": self.loader}

    def make_step(self, run: StageRun, stop: StopSignal) -> float:
        """Train on the next rows."""
        with run.timer.phase("train"):
            batch = self.make_batch(self.loader.draw())
            if self.weights is not None:
                self.weights.before_first_step()
            stats = self.update(self.ranks.prepare(batch))
        self.step += 1
        seconds = run.timer.export()
        speed = float(batch["attention_mask"].sum()) / seconds["train"]
        metrics = {
            "loss": stats.pop("loss"),
            "tokens_per_second/train": speed,
            **{f"model/{name}": value for name, value in stats.items()},
        }
        run.metrics.log(self.step, metrics)
        facts = run.facts(metrics)
        run.display.step(self.step, metrics["loss"], train_tokens_per_second=speed, seconds=seconds, facts=facts)
        return metrics["loss"]

    def evaluate(self) -> EvaluationResult:
        """Publish the current weights to the engine and run the held-out tasks."""
        rollout = self.rollout
        assert rollout is not None
        self.model.version = (
            max(self.model.version, rollout.get_version()) + 1
        )  # ranks in other processes do not count evaluations
        if self.weights is not None:
            self.weights.publish(self.model, self.model.version)
        else:
            arguments = self.model.version, self.config.rollout.logprob_tolerance
            scratch = self.directory.path.absolute() / ".weights"
            self.ranks.with_weights(lambda weights: load_and_audit(rollout, weights, *arguments), scratch)
        config, gconfig = self.config, self.config.evaluator.gconfig
        given = with_defaults(
            config.workflow, config.workflow_kwargs, {"enable_thinking": self.template_variables["enable_thinking"]}
        )
        kwargs = workflow_arguments(config, config.workflow, given, self.tokenizer, gconfig)
        return evaluate(rollout, self.valid_dataset, config.workflow, kwargs, gconfig)

    def is_done(self, evaluation: float | None) -> bool:
        """Return whether the evaluation reached ``stop_accuracy``."""
        wanted = self.config.stop_accuracy
        return evaluation is not None and wanted is not None and evaluation >= wanted


class SFTTrainer(SupervisedTrainer):
    """Trains a model on rows with ``messages`` and ``completion``; the loss covers the completion and its end-of-turn token.

    It takes the arguments of ``SupervisedTrainer``; :func:`supervised_batch` documents the rows.
    """

    teachers: Teachers | None = None

    @cached_property
    def processor(self) -> Any:
        """Image processor of the model. None if the rows have no images."""
        sees = bool(self.loader.rows[0].get("images"))
        return load_processor(self.config.tokenizer_path or self.config.model.path, self.tokenizer) if sees else None

    def make_batch(self, rows: Sequence[dict[str, Any]]) -> Trajectory:
        """See :func:`supervised_batch`. The teachers' columns are added if there are teachers."""
        if self.teachers is None:
            return supervised_batch(rows, self.tokenizer, self.processor, **self.template_variables)
        parts = [supervised_batch([row], self.tokenizer, self.processor, **self.template_variables) for row in rows]
        asyncio.run(self._score(self.teachers, parts, rows))
        return concat_padded_tensors(parts)

    def open(self, opened: ExitStack) -> None:
        """Start the engine that evaluates the model, and the teachers."""
        super().open(opened)
        config = self.config
        self.teachers = open_teachers(config.teachers, config.distillation, self.tokenizer, deterministic=config.deterministic)
        if self.teachers is not None:
            opened.callback(self.teachers.close)

    def update(self, batch: Trajectory) -> dict[str, float]:
        """Take a step on the mean negative log-likelihood of the completions' tokens, and on the teachers' loss."""
        section = self.config.distillation
        settings = {each.name: getattr(section, each.name) for each in dataclasses.fields(section)}
        return self.ranks.call("supervised_step", batch, distillation=None if self.teachers is None else settings)

    async def _score(self, teachers: Teachers, parts: Sequence[Trajectory], rows: Sequence[dict[str, Any]]) -> None:
        await run_concurrently(
            teachers.score(part, None, row, f"row {index} of step {self.step + 1}")
            for index, (part, row) in enumerate(zip(parts, rows, strict=True))
        )


class DPOTrainer(SupervisedTrainer):
    """Trains a model on rows with ``messages``, ``chosen`` and ``rejected``.

    The reference is ``config.ref`` if set. Otherwise it is the model before the first step, even after the run is resumed.
    """

    config: DPOConfig

    def make_batch(self, rows: Sequence[dict[str, Any]]) -> Trajectory:
        """See :func:`preference_batch`."""
        return preference_batch(rows, self.tokenizer, **self.template_variables)

    def update(self, batch: Trajectory) -> dict[str, float]:
        """Take a step of DPO."""
        return self.ranks.call("preference_step", batch, beta=self.config.beta, label_smoothing=self.config.label_smoothing)


def supervised_batch(
    rows: Sequence[dict[str, Any]], tokenizer: Any, processor: Any = None, **template_variables: Any
) -> Trajectory:
    """Convert rows with ``messages`` and ``completion`` to a batch: ``input_ids``, ``attention_mask``, ``loss_mask`` ``[B, L]``.

    Rows with ``images`` need the model's ``processor``; the batch then has ``multi_modal_inputs`` too.

    A row may instead have ``input_ids`` and ``loss_mask``, or ``segments``: an episode of several turns as
    ``[{"text": str, "train": bool}]``. In a segment, ``"branch": n`` (1, 2, …) puts it on an isolated branch. Every branch starts after
    the segments that precede the first branch.

    The chat template's end of turn (``data.chat_template.turn_end``) is appended to the completion and trained. If ``completion`` is a
    list of messages, every assistant message in it is trained, each after the same prompt as in sampling. If the template rewrites
    earlier turns, such a row becomes several rows of the batch.

    Args:
        rows: rows of a dataset.
        tokenizer: tokenizer with the chat template.
        processor: image processor. None if there are no images.
        template_variables: ``enable_thinking`` (off by default) and others, as in ``FormatConfig.template_variables``.

    Raises:
        DataError: a row lacks the columns.
    """
    return concat_padded_tensors([each for row in rows for each in _encode(row, tokenizer, processor, template_variables)])


def _encode(row: dict[str, Any], tokenizer: Any, processor: Any, variables: dict[str, Any]) -> list[Trajectory]:
    seen: dict[str, Any] = {}
    layout: dict[str, torch.Tensor] = {}
    variables = {"enable_thinking": False, **variables}
    if "input_ids" in row and "loss_mask" in row:
        ids, mask = list(row["input_ids"]), list(row["loss_mask"])
    elif "segments" in row:
        ids, mask, layout = _joined(row["segments"], tokenizer)
    elif "messages" in row and isinstance(row.get("completion"), list):
        if row.get("images"):
            raise DataError("a conversation of several replies has images; give images to rows whose completion is text.")
        sequences = worked_turns(tokenizer, row["messages"], row["completion"], row.get("tools"), **variables)
        return [_row_of(ids, mask, layout, processor, seen) for ids, mask in sequences]
    elif "messages" in row and "completion" in row:
        if processor is None:
            prompt = prompt_ids(tokenizer, row["messages"], row.get("tools"), **variables)
        else:
            prompt, seen = _seen_prompt(row, tokenizer, processor, variables)
        completion = reply_ids(tokenizer, row["completion"], prompt, **variables)
        ids, mask = [*prompt, *completion], [0] * len(prompt) + [1] * len(completion)
    else:
        raise DataError(
            f"a row for supervised training has the columns {', '.join(sorted(row))}; it needs messages and completion, "
            "segments, or input_ids and loss_mask."
        )
    return [_row_of(ids, mask, layout, processor, seen)]


def _row_of(
    ids: list[int], mask: list[int], layout: dict[str, torch.Tensor], processor: Any, seen: dict[str, Any]
) -> Trajectory:
    encoded = {
        "input_ids": torch.tensor([ids], dtype=torch.long),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
        "loss_mask": torch.tensor([mask], dtype=torch.long),
        **layout,
    }
    return encoded if processor is None else {**encoded, MULTI_MODAL: [seen or None]}


def _joined(segments: Sequence[dict[str, Any]], tokenizer: Any) -> tuple[list[int], list[int], dict[str, torch.Tensor]]:
    """Return ids, loss mask and, if segments name branches, the layout of an episode ``[{"text", "train", "branch"}]``."""
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


def _seen_prompt(
    row: dict[str, Any], tokenizer: Any, processor: Any, variables: dict[str, Any]
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return prompt ids with all image tokens, and the model's image inputs, as ``VisionRLVRWorkflow`` makes them."""
    images = as_images(row.get("images") or [])
    messages = place_images(row["messages"], len(images), image_placeholder(processor))
    text = prompt_text(tokenizer, messages, row.get("tools"), **variables)
    processed = processor(images=images or None, text=text, padding=False, return_tensors="pt")
    return processed["input_ids"][0].tolist(), multi_modal_outputs(processed) if images else {}


def preference_batch(rows: Sequence[dict[str, Any]], tokenizer: Any, **template_variables: Any) -> Trajectory:
    """Convert rows to pairs: ``input_ids``, ``attention_mask`` and ``loss_mask`` ``[2P, L]``, each chosen reply before its rejected one.

    Prompts and the ends of replies are the same as in ``supervised_batch``.

    Raises:
        DataError: a row is not a pair, or has images.
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
        shared = {key: row[key] for key in ("messages", "tools") if key in row}
        replies += [{**shared, "completion": row[key]} for key in ("chosen", "rejected")]
    return supervised_batch(replies, tokenizer, **template_variables)
