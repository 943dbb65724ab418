"""A model with its optimizer. It scores tokens, and takes optimizer steps whose gradient does not depend on micro-batches or ranks.

Invariants:

* the loss is a weighted sum over tokens, and the weights already include the denominator of the whole (mini)batch;
* a step with a non-finite loss or gradient leaves the weights unchanged and is counted; too many such steps in a row stop the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollwright.algorithms.losses import aggregation_weights
from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import TrainEngineConfig
from rollwright.errors import CheckpointError, ConfigError, TrainingError
from rollwright.experience.contract import CANDIDATE_LOGPROBS, TEACHER_TOP
from rollwright.experience.trajectory import Trajectory, tensor_container_to
from rollwright.inference.model_facts import refuse_unless_causal
from rollwright.inference.weights.adapter import AdapterSpec
from rollwright.inference.weights.stream import WeightStream
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.adapters import (
    BasePolicy,
    add_adapter,
    base_alone,
    base_of,
    carries_adapter,
    compute_in,
    initialise,
    load_adapter,
    names_in_model,
    refuse_other_adapter,
    set_dropout,
)
from rollwright.training.batch_losses import BatchLoss, MicroBatchLoss, named_loss, weighted_sum
from rollwright.training.fsdp import (
    allocate,
    initialise_randomly,
    is_sharded,
    own_tensors,
    reshard,
    shard,
    transformer_layers,
    wants_sharding,
    whole_weights,
    with_whole_weights,
)
from rollwright.training.hf_checkpoint import load_weights
from rollwright.training.layers import use_fast_layers
from rollwright.training.logprobs import TokenScorer
from rollwright.training.micro_batches import BatchDivision, attended_tokens
from rollwright.training.model import (
    checkpoint_layers,
    empty_copy,
    empty_model,
    frozen_model,
    held_dtype,
    load_model,
    resolve_device,
    resolve_dtype,
    save_model,
)
from rollwright.training.optimizer_and_schedule import load_optimizer_state, make_optimizer, make_scheduler, optimizer_state
from rollwright.training.parallel import full_tensor
from rollwright.training.recovery_checkpoint import (
    ModelTensors,
    fill,
    random_states,
    read_state,
    restore_random_states,
    write_state,
)
from rollwright.training.router_loss import RouterLoss
from rollwright.training.tree_attention import leave_uncompiled

logger = getLogger("training")


class TrainEngine:
    """A model that is trained or only scores tokens, in one process or sharded over several."""

    #: Keep a frozen copy of the initial weights as ``reference``, unless ``load_reference`` was called before.
    needs_reference = False

    #: The dropout of ``config.lora`` may be active in optimizer steps.
    drops_out = True

    #: Servers take memory of this process's GPU whenever it publishes (``rollout.colocate``).
    shares_gpu = False

    #: An inference engine in this process may compute with the model's own tensors, so a single process on a GPU does not shard them.
    shares_weights = True

    def __init__(self, config: TrainEngineConfig, model: nn.Module | None = None) -> None:
        """
        Args:
            config: the model's section.
            model: a loaded model. If None, ``initialize`` loads ``config.path``.
        """
        self.config = config
        self.model: Any = model
        self.device = torch.device("cpu")
        self.compute_dtype = torch.float32
        self.version = 0
        self.reference: TrainEngine | BasePolicy | None = None
        self.adapter: AdapterSpec | None = None  #: what is trained; None if all weights are
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: torch.optim.lr_scheduler.LambdaLR | None = None
        self._scorer: Any = None
        self._base: Any = None
        self._router_loss: RouterLoss | None = None
        self._bad_steps = 0
        self._losses: list[
            float | None
        ] = []  # of forward_backward since the last step; None for a batch without trained tokens
        self._stepped_at: int | None = None  # version at the last optimizer step
        self.division = BatchDivision(config)

    def initialize(self, addr: Any = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Load the model and prepare for training.

        Args:
            addr: ignored; accepted for compatibility with other trainers. Processes find each other through torchrun's environment.
            ft_spec: length of the run, for the learning-rate schedule.

        Raises:
            ConfigError: the model cannot be loaded, is not causal, or cannot be trained with this config.
        """
        del addr
        shards = wants_sharding(self.config, resolve_device(self.config.device), is_shared=self.shares_weights)
        self.device = parallel.join_processes(resolve_device(self.config.device), also_alone=shards)
        self.compute_dtype = resolve_dtype(self.config.dtype, self.device)
        if self.compute_dtype == torch.float16 and self.config.optimizer is not None:
            raise ConfigError("dtype=float16 cannot be trained with (its gradients underflow): use bfloat16 or float32.")
        if self.config.lora is not None and self.config.lora.dropout and not self.drops_out:
            raise ConfigError(
                f"lora.dropout is {self.config.lora.dropout}, but {type(self).__name__} compares its log-probabilities with others that are "
                "taken without dropout: set it to 0."
            )
        self._load(shards)
        with self._autocast():
            refuse_unless_causal(self.model, self._probe_scores)
        reshard(self._scorer)
        if self.needs_reference and self.reference is None:
            self.reference = self.frozen_copy() if self.adapter is None else BasePolicy(self.model, self.compute_logp)
        if self.config.optimizer is not None:
            self.optimizer = make_optimizer(self.model, self.config.optimizer)
            self.scheduler = make_scheduler(self.optimizer, self.config.optimizer, ft_spec)
            self._router_loss = RouterLoss(self.model, self.config.mb_spec.max_tokens_per_mb)

    def _load(self, shards: bool, like: TrainEngine | None = None) -> None:
        """Create the model, and load its weights from its path or copy them from ``like``. A sharded model loads one tensor at a time."""
        config, is_given = self.config, self.model is not None
        if like is not None:  # buffers keep their type, so that rotary frequencies stay exact
            held = next(like.model.parameters()).dtype
            dtype = torch.bfloat16 if like.compute_dtype == torch.bfloat16 else held
            self.model = empty_copy(like.model, dtype) if shards else frozen_model(like.model, dtype)
        elif not is_given:
            dtype = held_dtype(config, self.device)
            self.model = empty_model(config, dtype) if shards else load_model(config, dtype=dtype, device=self.device)
        self._adapt(like)
        layers = transformer_layers(self.model)
        if config.gradient_checkpointing:
            checkpoint_layers(self.model, layers, config.gradient_checkpointing_every)
        if config.compile_layers:
            leave_uncompiled()
            for layer in layers:
                layer.compile()
        elif self.device.type == "cpu" and self.compute_dtype == next(self.model.parameters()).dtype == torch.float32:
            use_fast_layers(self.model)
        self._scorer = self._new_scorer()
        if not shards:
            return
        shard(self._scorer, layers, self.compute_dtype, config, self.device)
        if is_given:
            return
        allocate(self.model, torch.device("cpu") if config.cpu_offload else self.device)
        if like is not None:
            fill(zip(own_tensors(like.model).values(), own_tensors(self.model).values(), strict=True))
        elif config.init_from_scratch:
            initialise_randomly(self.model)
        else:
            self._load_weights()

    def _adapt(self, like: TrainEngine | None) -> None:
        """Add the adapter of the config. An unsharded copy of another engine's model has it already."""
        if self.config.lora is None:
            return
        path = Path(self.config.path)
        base = str(path.absolute()) if self.config.path and path.is_dir() else self.config.path
        if like is None or not carries_adapter(self.model):
            self.adapter = add_adapter(self.model, self.config.lora, base)
        else:
            self.adapter = like.adapter
        compute_in(self.model, self.compute_dtype)

    @property
    def shared_model(self) -> Any:
        """The model whose tensors an engine in this process may compute with; None if it is sharded.

        If an adapter is trained, it is the base, and the engine keeps copies of published adapters.
        """
        if is_sharded(self.model):
            return None
        if self.adapter is not None and self._base is None:
            self._base = base_of(self.model)
        return self.model if self.adapter is None else self._base

    def _load_weights(self) -> None:
        with base_alone(self.model):
            load_weights(self.model, self.config.path)
        initialise(self.model)

    def _new_scorer(self) -> nn.Module:
        return TokenScorer(self.model, chunk_bytes=self.config.logits_chunk_mib << 20)

    def _probe_scores(self, ids_BL: Tensor) -> Tensor:
        ids_BL = ids_BL.to(self.device)
        wanted_BL = attended_tokens({"input_ids": ids_BL})
        return self._scorer({"input_ids": ids_BL}, wanted_BL, **self._scorer.check_options)[0][:, 1:]

    def load_reference(self, config: TrainEngineConfig) -> None:
        """Load the frozen reference model from its own config. Call this before ``initialize``."""
        self.reference = TrainEngine(dataclasses.replace(config, optimizer=None))
        self.reference.shares_weights = self.shares_weights
        self.reference.initialize()

    def frozen_copy(self) -> TrainEngine:
        """Return an engine that holds a frozen copy of the current weights and only scores tokens."""
        engine = TrainEngine(dataclasses.replace(self.config, optimizer=None))
        engine.device, engine.compute_dtype = self.device, self.compute_dtype
        engine._load(is_sharded(self.model), like=self)
        engine.model.requires_grad_(False)
        return engine

    # Scoring

    @torch.no_grad()
    def compute_logp(self, batch: Trajectory, *, loss_tokens_only: bool = False) -> Tensor:
        """Compute the log-probabilities of a batch's tokens under the current weights.

        Args:
            batch: a trajectory. If it has a ``temperature``, the logits are divided by it.
            loss_tokens_only: score only tokens whose ``loss_mask`` is 1, which is cheaper than all tokens.

        Returns:
            ``[B, L]`` float32 on ``device``, aligned like ``logprobs``; 0.0 in column 0, at padding and at tokens that are not scored.
        """
        batch = tensor_container_to(dict(batch), self.device)
        wanted_BL = trained_tokens(batch) if loss_tokens_only else attended_tokens(batch)
        scores_BL = torch.zeros(wanted_BL.shape, dtype=torch.float32, device=self.device)
        self._run_mode(training=False)
        with self._autocast():
            for index, part in self.division.micro_batches(self._scorer, {**batch, "_wanted": wanted_BL}):
                part_scores, _ = self._scorer(part, part["_wanted"])
                if len(index):
                    scores_BL[index, : part_scores.shape[1]] = part_scores.float()
        return scores_BL

    @contextlib.contextmanager
    def gradients_of_logp(self, batch: Trajectory) -> Iterator[dict[str, Tensor | None]]:
        """Compute the gradients of the summed log-probabilities of the tokens whose ``loss_mask`` is 1. Collective.

        Yields:
            The gradient of each parameter by name, sharded like the parameter; None if it has none. They are dropped after the block,
            and those of ``forward_backward`` are put back.
        """
        batch = tensor_container_to(dict(batch), self.device)
        kept = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        try:
            with self._autocast():
                logprobs_BL, _ = self._scorer(batch, trained_tokens(batch))
            logprobs_BL.sum().backward()
            yield {name: parameter.grad for name, parameter in self.model.named_parameters()}
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    # Optimisation

    def forward_backward(self, batch: Trajectory, loss: str | MicroBatchLoss, **arguments: Any) -> dict[str, float]:
        """Compute a loss on a batch and add its gradient to that of earlier calls since the last ``optim_step``. Collective.

        The gradient depends neither on the micro-batches nor on the number of ranks, each of which passes its own rows.

        Args:
            batch: a trajectory. Its ``loss_weights [B, L]`` are the weights of the tokens in the loss; if absent, those of
                ``loss_weights(batch)``. To divide a batch over several calls, compute them before, from the whole batch.
            loss: a name: ``sft``, ``dpo``, ``policy`` (the loss of the ``actor`` section), a policy loss such as ``cispo``, or one that was
                registered in ``BATCH_LOSSES``. Or a function of a micro-batch's rows, their log-probabilities ``[B, L]`` and their
                entropies ``[B, L]`` (zeros without ``with_entropy``). It returns the loss of each token, ``[B, L]``, or the sum of
                these times ``rows["loss_weights"]``.
            arguments: arguments of a named loss. With a function: ``with_entropy=True`` computes entropies, and
                ``entropy_gradient=True`` lets gradients flow through them.

        Returns:
            ``loss`` and the metrics of a named loss; ``docs/own-loop.md`` lists them.

        Raises:
            TrainingError: the engine has no optimizer, there is no such loss, or the loss does not fit the batch. Gradients of earlier
                calls are discarded.
        """
        self._require_optimizer()
        try:
            return self._accumulate(self._loss_of(batch, loss, arguments))
        except BaseException:
            self._discard_gradients()
            raise

    def _loss_of(self, batch: Trajectory, loss: str | MicroBatchLoss, arguments: dict[str, Any]) -> BatchLoss:
        if isinstance(loss, str):
            return named_loss(loss, self, batch, arguments)
        if unknown := arguments.keys() - {"with_entropy", "entropy_gradient"}:
            raise TrainingError(
                f"forward_backward: a function as the loss takes no {', '.join(sorted(unknown))}, only with_entropy and "
                "entropy_gradient; bind other values with functools.partial."
            )
        batch = tensor_container_to(dict(batch), self.device)
        if batch.get("loss_weights") is None:
            batch["loss_weights"] = self.loss_weights(batch)
        return BatchLoss(batch, loss, **arguments)

    def loss_weights(self, batch: Trajectory) -> Tensor:
        """Return the weight of each token in the loss, ``[B, L]``: that of a mean over the tokens to train on all ranks. Collective."""
        return aggregation_weights(trained_tokens(batch).float(), "token", reduce=parallel.summed)

    def optim_step(self) -> dict[str, float]:
        """Take one optimizer step with the gradients of ``forward_backward``, clipped, and clear them. Collective.

        Returns:
            ``loss`` (the sum of the calls'), ``grad_norm`` (before clipping), ``skipped_steps`` (0 or 1) and ``lr``. If no token of these
            batches trains, no step is taken, and ``loss`` and ``grad_norm`` are absent.

        Raises:
            TrainingError: ``forward_backward`` was not called, too many steps in a row had a non-finite loss or gradient, or the engine
                has no optimizer.
        """
        self._require_optimizer()
        if not self._losses:
            raise TrainingError("optim_step: there is no gradient yet; call forward_backward(batch, loss) first.")
        losses, lr = [loss for loss in self._losses if loss is not None], self.learning_rate
        self._losses.clear()
        return {**(self._step(sum(losses)) if losses else {"skipped_steps": 0.0}), "lr": lr}

    def optimise(
        self,
        batch: Trajectory,
        loss: MicroBatchLoss,
        *,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> dict[str, float]:
        """Take one optimizer step on a (mini)batch that is on ``device`` and has ``loss_weights``.

        Calls ``forward_backward`` and ``optim_step``; see there for the arguments.
        """
        self.forward_backward(batch, loss, with_entropy=with_entropy, entropy_gradient=entropy_gradient)
        return self.optim_step()

    def _accumulate(self, prepared: BatchLoss) -> dict[str, float]:
        """Compute the micro-batches of a loss, and add their gradients."""
        if prepared.is_empty:
            self._losses.append(None)
            return prepared.measure()
        self.before_update()
        self._run_mode(training=True)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._autocast():
            parts = self.division.micro_batches(self._scorer, prepared.batch)
        entropies = {"with_entropy": prepared.with_entropy, "entropy_gradient": prepared.entropy_gradient}
        for index, part in parts:
            if not len(index):
                part["loss_weights"] = torch.zeros_like(part["loss_weights"])
            with self._autocast():
                logprobs_BL, entropy_BL, *candidates = self._scorer(
                    part, part["loss_weights"] != 0, **entropies, candidates_BLK=part.get(TEACHER_TOP[0])
                )
            if candidates:
                part[CANDIDATE_LOGPROBS] = candidates[0]
            value = weighted_sum(prepared.loss(part, logprobs_BL, entropy_BL), part)
            # FSDP averages gradients over ranks, but the loss weights already include the denominator of all ranks.
            (value * parallel.world_size()).backward()
            total += value.detach().double()
        if self._router_loss is not None and self._router_loss.coefficient:
            with self._autocast():
                value = self._router_loss(prepared.batch)
            value.backward()
            total += value.detach().double()
        self._run_mode(training=False)  # checkpointing disables the KV cache, and an engine may sample with this model next
        loss = float(parallel.summed(total))
        metrics = {"loss": loss, **prepared.measure()}
        self._losses.append(metrics["loss"] if math.isfinite(loss) else loss)
        return metrics

    def before_update(self) -> None:
        """Prepare for a change of the weights: a trainer that publishes pauses its engine. Collective."""

    @property
    def is_as_published(self) -> bool:
        """True if no optimizer step was made since the weights got their version."""
        return self._stepped_at != self.version

    def _require_optimizer(self) -> None:
        if self.optimizer is None:
            raise TrainingError("This engine only scores (its optimizer is None): it cannot be trained.")

    def _discard_gradients(self) -> None:
        self._losses.clear()
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def _step(self, loss: float) -> dict[str, float]:
        assert self.optimizer is not None
        assert self.config.optimizer is not None
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm_tensor = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        norm = float(full_tensor(norm_tensor))
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.optimizer.gradient_clipping, norm_tensor)
            self.optimizer.step()
            self._bad_steps, self._stepped_at = 0, self.version
        self.optimizer.zero_grad(set_to_none=True)
        if not finite:
            self._bad_steps += 1
            logger.warning(
                "Skipped an optimizer step at version %d: loss %s, gradient norm %s (%d in a row).",
                self.version,
                loss,
                norm,
                self._bad_steps,
            )
            if self._bad_steps >= self.config.max_bad_steps:
                raise TrainingError(
                    f"{self._bad_steps} optimizer steps in a row had a loss ({loss}) or gradient norm ({norm}) that is not "
                    f"finite, at version {self.version}; lower optimizer.lr, or look for rewards or log-probabilities that "
                    "are not finite. The weights are those before the first of these steps."
                )
        return {"loss": loss, "grad_norm": norm, "skipped_steps": float(not finite)}

    def sft_update(self, batch: Trajectory, distillation: dict[str, Any] | None = None) -> dict[str, float]:
        """Take one supervised optimizer step on the mean negative log-likelihood of the tokens whose ``loss_mask`` is 1.

        Args:
            batch: ``input_ids``, ``attention_mask`` and ``loss_mask``, all ``[B, L]``.
            distillation: keys of ``DistillationConfig``, if a teacher has scored the batch; its loss is added.

        Returns:
            ``loss`` (nats per token), ``grad_norm``, ``skipped_steps``, ``tokens`` and ``lr``.
        """
        name, arguments = ("distill", {"settings": distillation}) if distillation else ("sft", {})
        stats = self.forward_backward(batch, name, **arguments)
        return {**stats, **self.optim_step()}

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None else 0.0

    def step_lr_scheduler(self) -> None:
        """Advance the learning-rate schedule by one step of the run."""
        if self.scheduler is not None:
            with (
                warnings.catch_warnings()
            ):  # a skipped step, or the critic's warm-up, leaves the schedule ahead of the optimizer
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self.scheduler.step()

    # Saving

    def save(self, path: str | Path, tokenizer: Any = None) -> None:
        """Write a Hugging Face checkpoint, or a PEFT directory if an adapter is trained. The directory appears atomically."""

        def write(weights: WeightStream) -> None:
            save_model(self.model, path, tokenizer=tokenizer, image_processor=self._image_processor(), weights=weights)

        with_whole_weights(self.weights(), write)

    def load(self, path: str | Path) -> None:
        """Load the weights that ``save`` wrote, or of another checkpoint of this architecture; an adapter, if one is trained. Collective.

        The version, the optimizer and the schedule are unchanged, and gradients are discarded. The connected engines sample with the
        weights after the next publication.

        Raises:
            ConfigError: there is no checkpoint in safetensors files, or it belongs to another model.
        """
        self.before_update()
        self._discard_gradients()
        if self.adapter is None:
            load_weights(self.model, str(path))
        else:
            load_adapter(self.model, self.adapter, str(path))
        self._stepped_at = self.version

    def save_state(self, path: str | Path) -> None:
        """Write ``state_dict`` to a directory, which appears atomically. Collective."""
        write_state(path, self.state_dict())

    def load_state(self, path: str | Path) -> None:
        """Restore what ``save_state`` wrote: training continues bit for bit. Collective. The next publication is to be ``republish``.

        Raises:
            CheckpointError: the directory cannot be read, or belongs to another model.
        """
        self.before_update()
        self.load_state_dict(read_state(path))

    def _image_processor(self) -> Any:
        """Load the image processor from ``config.path``. Returns None for a text model, or if there is no image processor."""
        if not self.config.path or not hasattr(self.model.config, "vision_config"):
            return None
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self.config.path)
        except (OSError, ValueError, ImportError) as error:
            logger.warning("%s has no image processor to copy into checkpoints: %s", self.config.path, error)
            return None

    def weights(self, dtype: torch.dtype | None = None) -> WeightStream:
        """Stream the model's tensors by name, or only the adapter's under PEFT's names; each is gathered when it is read. Collective.

        Args:
            dtype: type to convert floating-point tensors to. If None, each tensor keeps its own type, as an adapter's always do.
        """
        if self.adapter is not None:
            return whole_weights(self.model, names=names_in_model(self.model), adapter=self.adapter)
        return whole_weights(self.model, dtype)

    def _trained_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a recovery checkpoint holds, by their names in the model."""
        own = own_tensors(self.model)
        return own if self.adapter is None else {name: own[name] for name in names_in_model(self.model).values()}

    def full_weights(self) -> dict[str, Tensor]:
        """Copy the tensors of ``weights`` to the CPU of every rank, by name. A tied tensor appears once."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.weights()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume training from: trained weights, optimizer, schedule, random states and version.

        Tensors are not copied, and each rank returns its own shards; ``RecoverCheckpoints`` writes them.
        """
        weights = ModelTensors(self._trained_tensors())
        state: dict[str, Any] = {"version": self.version, "weights": weights, "random": random_states()}
        if self.adapter is not None:
            state["adapter"] = self.adapter.to_peft()
        if self.optimizer is not None and self.scheduler is not None:
            state |= {**optimizer_state(self.model, self.optimizer, self.scheduler), "bad_steps": self._bad_steps}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from ``state_dict`` or a checkpoint. Parameters keep their storage, because an engine may share it.

        Raises:
            CheckpointError: the state belongs to another model or adapter.
        """
        refuse_other_adapter(state.get("adapter"), self.adapter)
        own, weights = self._trained_tensors(), state["weights"]
        if own.keys() != weights.keys():
            difference = sorted(own.keys() ^ weights.keys())[:3]
            raise CheckpointError(f"The checkpoint is of another model: tensors {difference} are in only one of the two.")
        for name, tensor in own.items():
            if tuple(weights[name].shape) != tuple(tensor.shape):
                raise CheckpointError(
                    f"The checkpoint is of another model: {name} is {list(weights[name].shape)} there, {list(tensor.shape)} here."
                )
        self._discard_gradients()
        fill((weights[name], tensor) for name, tensor in own.items())
        self._stepped_at = None
        self.version = int(state["version"])
        if self.optimizer is not None and self.scheduler is not None and "optimizer" in state:
            load_optimizer_state(self.model, self.optimizer, self.scheduler, state)
            self._bad_steps = int(state["bad_steps"])
        restore_random_states(state["random"])

    def destroy(self) -> None:
        """Free the memory of the model, the reference and the optimizer."""
        if self.reference is not None:
            self.reference.destroy()
        self.reference = self.model = self._scorer = self._base = self.optimizer = self.scheduler = None

    def _autocast(self) -> Any:
        is_held_so = self.adapter is None and next(self.model.parameters()).dtype == torch.bfloat16
        if self.compute_dtype != torch.bfloat16 or is_held_so:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def _run_mode(self, *, training: bool) -> None:
        # The model's own dropout is off in either mode; transformers' gradient checkpointing is active only in training mode.
        checkpoints = training and self.config.gradient_checkpointing
        if self.model.training != checkpoints:  # ``train`` visits every module
            self.model.train(checkpoints)
        if self.config.lora is not None and self.config.lora.dropout:
            set_dropout(self.model, training)


def trained_tokens(batch: Trajectory) -> Tensor:
    """Return the bool mask ``[B, L]`` of the tokens to train: those that the policy sampled."""
    if "loss_mask" not in batch:
        raise TrainingError("The batch has no loss_mask, so it is unknown which tokens the policy sampled.")
    return attended_tokens(batch) & (batch["loss_mask"] > 0)
