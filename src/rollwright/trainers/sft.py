"""Supervised training on worked completions, until the end or until it is accurate enough."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from rollwright.config.experiment import FinetuneSpec, SFTConfig
from rollwright.data.loader import TaskLoader
from rollwright.data.tokenizer import load_tokenizer
from rollwright.data.vision import as_images, image_placeholder, load_processor, multi_modal_outputs, place_images
from rollwright.errors import ConfigError, DataError
from rollwright.experience.contract import MULTI_MODAL
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors, tensor_container_to
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.evaluation import evaluate
from rollwright.trainers.rollout_backend import make_local_engine
from rollwright.trainers.schedule import Schedule
from rollwright.trainers.stage_run import StageRun
from rollwright.trainers.stop_signal import StopSignal
from rollwright.trainers.workflow_arguments import with_defaults
from rollwright.training.engine import TrainEngine
from rollwright.training.publish import SharedWeights


class SFTTrainer:
    """Trains a model on rows with ``messages`` and ``completion``; the loss is on the completion and the end token.

    Where ``stop_accuracy`` is set, a workflow scores the model on ``valid_dataset`` every ``evaluator.every_steps`` steps, and
    training stops when the mean reward reaches it.

    Args:
        config: the experiment.
        train_dataset: rows with ``messages`` (or ``prompt``) and ``completion``.
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
        if config.stop_accuracy is not None and not (valid_dataset and config.workflow and config.evaluator.every_steps):
            raise ConfigError("stop_accuracy needs valid_dataset, workflow and evaluator.every_steps to be set as well.")
        self.config = config
        self.valid_dataset = list(valid_dataset or [])[: config.evaluator.limit]
        self.directory = directory
        self.tokenizer = load_tokenizer(config.tokenizer_path or config.model.path, config.model.trust_remote_code)
        self.processor = None
        if any(row.get("images") for row in train_dataset[:1]):
            self.processor = load_processor(config.tokenizer_path or config.model.path, self.tokenizer)
        dataset = config.train_dataset
        self.loader = TaskLoader(
            train_dataset, dataset.batch_size, shuffle=dataset.shuffle, drop_last=dataset.drop_last, seed=config.seed
        )
        self.spec = FinetuneSpec(config.total_train_epochs, len(train_dataset), dataset.batch_size, config.total_train_steps)

    def __enter__(self) -> SFTTrainer:
        torch.manual_seed(self.config.seed)
        self.model = TrainEngine(self.config.model)
        self.model.initialize(None, self.spec)
        self.rollout = None
        if self.config.workflow and self.valid_dataset:  # nothing is sampled where nothing is evaluated
            self.rollout = make_local_engine(self.config, self.model, self.tokenizer)
        if self.rollout is not None:
            self.rollout.initialize()
            self.weights = SharedWeights(self.rollout)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.rollout is not None:
            self.rollout.destroy()
        self.model.destroy()

    def train(self) -> dict[str, Any]:
        """Run to the end, or to ``stop_accuracy``.

        Returns:
            ``{"steps", "loss", "eval": {step: accuracy}, "seconds": {...}, "checkpoint": path}``.
        """
        config = self.config
        total = self.spec.total_steps
        evaluating = Schedule(config.evaluator, self.spec.steps_per_epoch)
        batches = self.loader.forever()
        evaluations: dict[int, float] = {}
        loss = float("nan")
        step = 0
        with (
            StopSignal() as stop,
            StageRun(
                config, self.directory, total_steps=total, resume_step=None, tokenizer=self.tokenizer, value_name="loss"
            ) as run,
        ):
            while step < total and stop.received is None:
                with run.timer.phase("train"):
                    batch = supervised_batch(next(batches), self.tokenizer, self.processor)
                    if self.rollout is not None:
                        self.weights.before_first_step()
                    stats = self.model.sft_update(tensor_container_to(batch, self.model.device))
                    self.model.step_lr_scheduler()
                step += 1
                loss = stats["loss"]
                seconds = run.timer.export()
                speed = float(batch["attention_mask"].sum()) / seconds["train"]
                run.log(step, {"loss": loss, "tokens_per_second/train": speed, **{f"model/{k}": v for k, v in stats.items()}})
                run.display.step(step, loss, train_tokens_per_second=speed, seconds=seconds)
                if self.rollout is not None and (evaluating.due(step) or step == total):
                    with run.timer.phase("eval"):
                        evaluations[step] = self._accuracy()
                    run.log(step, {"eval/reward": evaluations[step]})
                    run.display.evaluation(step, evaluations[step])
                    if config.stop_accuracy is not None and evaluations[step] >= config.stop_accuracy:
                        break
            if stop.received is not None:
                raise SystemExit(stop.exit_code)
            checkpoint = self.directory.checkpoints / "final"
            self.model.save(checkpoint, self.tokenizer)
            return {
                "steps": step,
                "loss": loss,
                "eval": evaluations,
                "seconds": run.timer.totals,
                "checkpoint": str(checkpoint),
            }

    def _accuracy(self) -> float:
        assert self.rollout is not None
        self.model.version += 1
        self.weights.publish(self.model, self.model.version)
        gconfig = self.config.evaluator.gconfig
        defaults = {"reward_fn": self.config.reward_fn, "gconfig": gconfig, "tokenizer": self.tokenizer}
        kwargs = with_defaults(self.config.workflow, self.config.workflow_kwargs, defaults)
        return evaluate(self.rollout, self.valid_dataset, self.config.workflow, kwargs, gconfig).reward


def supervised_batch(rows: Sequence[dict[str, Any]], tokenizer: Any, processor: Any = None) -> Trajectory:
    """Rows with ``messages`` and ``completion`` as a batch: ``input_ids``, ``attention_mask``, ``loss_mask`` ``[B, L]``.

    Rows with ``images`` need the model's ``processor``; then the batch has ``multi_modal_inputs``, too.

    A row may instead carry ``input_ids`` and ``loss_mask`` (a worked episode of several turns). The end token follows the
    completion and is learned.

    Raises:
        DataError: a row lacks the columns.
    """
    return concat_padded_tensors([_encode(row, tokenizer, processor) for row in rows])


def _encode(row: dict[str, Any], tokenizer: Any, processor: Any = None) -> Trajectory:
    seen: dict[str, Any] = {}
    if "input_ids" in row and "loss_mask" in row:
        ids, mask = list(row["input_ids"]), list(row["loss_mask"])
    elif "segments" in row:  # [{"text": str, "train": bool}]: a worked episode of several turns
        encoded = [(tokenizer.encode(part["text"], add_special_tokens=False), part["train"]) for part in row["segments"]]
        ids = [token for tokens, _ in encoded for token in tokens]
        mask = [int(trained) for tokens, trained in encoded for _ in tokens]
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
    }
    return encoded if processor is None else {**encoded, MULTI_MODAL: [seen or None]}


def _seen_prompt(row: dict[str, Any], tokenizer: Any, processor: Any) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Prompt ids with every image token, and what the model takes of the images; as ``VisionRLVRWorkflow`` makes them."""
    images = as_images(row.get("images") or [])
    messages = place_images(row["messages"], len(images), image_placeholder(processor))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    processed = processor(images=images or None, text=text, padding=False, return_tensors="pt")
    return processed["input_ids"][0].tolist(), multi_modal_outputs(processed) if images else {}
