"""A model with its optimizer: scoring tokens, and optimizer steps whose gradient does not depend on micro-batches or ranks.

Invariants:

* a loss arrives here as a sum of weighted tokens whose weights already carry the denominator of the whole (mini)batch;
* a step whose loss or gradient is not finite changes nothing and is counted; too many in a row stop the run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollwright.algorithms.losses import aggregation_weights, sft_loss
from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import OptimizerConfig, TrainEngineConfig
from rollwright.errors import CheckpointError, ConfigError, TrainingError
from rollwright.experience.trajectory import Trajectory, tensor_container_to
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.checkpoint import random_states, restore_random_states
from rollwright.training.logprobs import TokenScorer, use_fast_norms
from rollwright.training.micro_batches import PrefixSharing, attended_tokens
from rollwright.training.model import load_model, owned_state, resolve_device, resolve_dtype, save_model
from rollwright.training.parallel import TokenStatistics

logger = getLogger("training")

#: The weighted sum of a micro-batch's token losses: (rows of it, scores, entropies, statistics) -> 0-d loss.
MicroBatchLoss = Callable[[Trajectory, Tensor, Tensor, TokenStatistics], Tensor]


class TrainEngine:
    """A model that is trained or scored, in one process or sharded over several."""

    #: Keep a frozen copy of the first weights as ``reference``, unless ``load_reference`` was called before.
    needs_reference = False

    def __init__(self, config: TrainEngineConfig, model: nn.Module | None = None) -> None:
        """
        Args:
            config: the model's section.
            model: a model that is already loaded; None: ``initialize`` loads ``config.path``.
        """
        self.config = config
        self.model: Any = model
        self.device = torch.device("cpu")
        self.compute_dtype = torch.float32
        self.version = 0
        self.reference: TrainEngine | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: torch.optim.lr_scheduler.LambdaLR | None = None
        self._scorer: Any = None
        self._bad_steps = 0
        self._sharing = PrefixSharing(config)

    def initialize(self, addr: Any = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Load the model and make ready to train.

        Args:
            addr: kept for callers that pass one; processes find each other by torchrun's environment.
            ft_spec: length of the run, from which schedules are computed.

        Raises:
            ConfigError: the model cannot be loaded, or the configuration cannot be trained with.
        """
        del addr
        self.device = parallel.join_processes(resolve_device(self.config.device))
        self.compute_dtype = resolve_dtype(self.config.dtype, self.device)
        if self.compute_dtype == torch.float16 and self.config.optimizer is not None:
            raise ConfigError("dtype=float16 cannot be trained with (its gradients underflow): use bfloat16 or float32.")
        if self.model is None:
            self.model = load_model(self.config, device=self.device)
        if self.needs_reference and self.reference is None:
            self.reference = self.frozen_copy()
        if self.device.type == "cpu" and self.compute_dtype == next(self.model.parameters()).dtype == torch.float32:
            use_fast_norms(self.model)
        self._scorer = TokenScorer(self.model, chunk_tokens=self.config.logits_chunk_tokens)
        self._scorer = parallel.shard(self._scorer, parallel.transformer_layers(self.model), self.compute_dtype)
        if self.config.optimizer is not None:
            self.optimizer = make_optimizer(self.model, self.config.optimizer, sharded=parallel.world_size() > 1)
            self.scheduler = make_scheduler(self.optimizer, self.config.optimizer, ft_spec)

    def load_reference(self, config: TrainEngineConfig) -> None:
        """Load the frozen reference that this model is compared with; called before ``initialize``."""
        self.reference = TrainEngine(dataclasses.replace(config, optimizer=None))
        self.reference.initialize()

    def frozen_copy(self) -> TrainEngine:
        """An engine over a copy of this one's present weights that is only scored."""
        config = dataclasses.replace(self.config, optimizer=None)
        model = copy.deepcopy(self.model).requires_grad_(False)
        if self.compute_dtype == torch.bfloat16:
            for parameter in model.parameters():  # not the buffers: rotary frequencies stay exact
                parameter.data = parameter.data.to(self.compute_dtype)
        engine = TrainEngine(config, model)
        engine.initialize()
        return engine

    # Scoring

    @torch.no_grad()
    def compute_logp(self, batch: Trajectory, *, loss_tokens_only: bool = False) -> Tensor:
        """Log-probabilities of a batch's tokens under the present weights.

        Args:
            batch: a trajectory; logits are divided by ``temperature`` where it has one.
            loss_tokens_only: only where ``loss_mask`` is 1, which is cheaper; else for every token but the first.

        Returns:
            ``[B, L]`` float32 on ``device``, aligned like ``logprobs``; 0.0 at index 0, at padding, and where not asked.
        """
        batch = tensor_container_to(dict(batch), self.device)
        wanted_BL = trained_tokens(batch) if loss_tokens_only else attended_tokens(batch)
        scores_BL = torch.zeros(wanted_BL.shape, dtype=torch.float32, device=self.device)
        self._run_mode(training=False)
        for index, part in self._micro_batches({**batch, "_wanted": wanted_BL}):
            with self._autocast():
                part_scores, _ = self._scorer(part, part["_wanted"])
            if len(index):
                scores_BL[index, : part_scores.shape[1]] = part_scores.float()
        return scores_BL

    # Optimisation

    def optimise(
        self, batch: Trajectory, loss: MicroBatchLoss, statistics: TokenStatistics, *, with_entropy: bool = False
    ) -> dict[str, float]:
        """One optimizer step over a (mini)batch that is on ``device``.

        Args:
            batch: with ``loss_weights [B, L]``: each token's weight, 0 where it does not train.
            loss: makes the weighted sum of a micro-batch.
            statistics: passed to ``loss``.
            with_entropy: entropies are computed and passed to ``loss``.

        Returns:
            ``loss``, ``grad_norm`` (before clipping) and ``skipped_steps`` (0 or 1).

        Raises:
            TrainingError: too many steps in a row were not finite, or the engine has no optimizer.
        """
        if self.optimizer is None:
            raise TrainingError("This engine only scores (its optimizer is None): it cannot be trained.")
        self._run_mode(training=True)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, part in self._micro_batches(batch):
            if not len(index):
                part["loss_weights"] = torch.zeros_like(part["loss_weights"])
            with self._autocast():
                logprobs_BL, entropy_BL = self._scorer(part, part["loss_weights"] != 0, with_entropy=with_entropy)
            value = loss(part, logprobs_BL, entropy_BL, statistics)
            # FSDP averages gradients over ranks; the weights' denominator is already that of all of them.
            (value * parallel.world_size()).backward()
            total += value.detach().double()
        self._run_mode(training=False)  # an engine that shares the model samples next, and checkpointing switches caches off
        return self._step(float(parallel.summed(total)))

    def _step(self, loss: float) -> dict[str, float]:
        assert self.optimizer is not None
        assert self.config.optimizer is not None
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm_tensor = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        norm = float(parallel.full_tensor(norm_tensor))
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.optimizer.gradient_clipping, norm_tensor)
            self.optimizer.step()
            self._bad_steps = 0
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
                    "are not finite. Weights are those before the first of them."
                )
        return {"loss": loss, "grad_norm": norm, "skipped_steps": float(not finite)}

    def sft_update(self, batch: Trajectory) -> dict[str, float]:
        """One optimizer step of supervised training: the mean negative log-likelihood of the tokens in ``loss_mask``.

        Args:
            batch: ``input_ids``, ``attention_mask`` and ``loss_mask``, all ``[B, L]``.

        Returns:
            ``loss`` (nats a token), ``grad_norm``, ``skipped_steps``, ``tokens`` and ``lr``.
        """
        batch = tensor_container_to(dict(batch), self.device)
        batch.pop("temperature", None)
        mask_BL = trained_tokens(batch).float()
        batch["loss_weights"] = aggregation_weights(mask_BL, "token", reduce=parallel.summed)
        tokens = float(parallel.summed(mask_BL.sum()))
        if tokens == 0:
            raise TrainingError("A supervised batch has no token with loss_mask 1: nothing in it would train.")

        def loss(part: Trajectory, logprobs_BL: Tensor, entropy_BL: Tensor, statistics: TokenStatistics) -> Tensor:
            return (part["loss_weights"] * sft_loss(logprobs_BL)).sum()

        lr = self.learning_rate
        return {**self.optimise(batch, loss, TokenStatistics(self.device)), "tokens": tokens, "lr": lr}

    @property
    def learning_rate(self) -> float:
        """The rate of the next optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None else 0.0

    def step_lr_scheduler(self) -> None:
        """Move the schedule on by one step of the run."""
        if self.scheduler is not None:
            self.scheduler.step()

    # Saving

    def save(self, path: str | Path, tokenizer: Any = None) -> None:
        """Write the model in Hugging Face form; the directory appears whole or not at all."""
        state = self.full_weights()
        if parallel.rank() == 0:
            save_model(self.model, path, tokenizer=tokenizer, image_processor=self._image_processor(), state=state)

    def _image_processor(self) -> Any:
        """Of a model that sees, that of the directory it was loaded from, so that its checkpoints see, too."""
        if not self.config.path or not hasattr(self.model.config, "vision_config"):
            return None
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self.config.path)
        except (OSError, ValueError, ImportError) as error:
            logger.warning("%s has no image processor to copy into checkpoints: %s", self.config.path, error)
            return None

    def full_weights(self) -> dict[str, Tensor]:
        """The model's tensors by name, whole, as copies on the CPU; tied tensors are one object."""
        if parallel.world_size() == 1:
            return owned_state(self.model)
        return {name: parallel.full_tensor(tensor).cpu() for name, tensor in self.model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """All that training goes on from: weights, optimizer, schedule, random states, version; whole on every rank."""
        weights = {name: tensor.clone() for name, tensor in self.full_weights().items()}
        state: dict[str, Any] = {"version": self.version, "weights": weights, "random": random_states()}
        if self.optimizer is not None and self.scheduler is not None:
            state |= {**optimizer_state(self.model, self.optimizer, self.scheduler), "bad_steps": self._bad_steps}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave. Parameters keep their storage, which an inference engine may share.

        Raises:
            CheckpointError: the state is that of another model.
        """
        self._load_weights(state["weights"])
        self.version = int(state["version"])
        if self.optimizer is not None and self.scheduler is not None and "optimizer" in state:
            load_optimizer_state(self.model, self.optimizer, self.scheduler, state)
            self._bad_steps = int(state["bad_steps"])
        restore_random_states(state["random"])

    def destroy(self) -> None:
        """Free the memory of the model, the reference and the optimizer."""
        if self.reference is not None:
            self.reference.destroy()
        self.reference = self.model = self._scorer = self.optimizer = self.scheduler = None

    # Parts

    @torch.no_grad()
    def _load_weights(self, weights: dict[str, Tensor]) -> None:
        own = self.model.state_dict()
        if own.keys() != weights.keys():
            difference = sorted(own.keys() ^ weights.keys())[:3]
            raise CheckpointError(f"The checkpoint is of another model: tensors {difference} are in only one of the two.")
        for name, tensor in own.items():
            saved = weights[name]
            if saved.shape != tensor.shape:
                raise CheckpointError(
                    f"The checkpoint is of another model: {name} is {list(saved.shape)} there, {list(tensor.shape)} here."
                )
            tensor.copy_(parallel.placed_like(saved, tensor))

    def _micro_batches(self, batch: Trajectory) -> list[tuple[Tensor, Trajectory]]:
        with self._autocast():
            return self._sharing.micro_batches(self._scorer, batch)

    def _autocast(self) -> Any:
        parameter_dtype = next(self.model.parameters()).dtype
        if self.compute_dtype != torch.bfloat16 or parameter_dtype == self.compute_dtype:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def _run_mode(self, *, training: bool) -> None:
        # Dropout is off either way; gradient checkpointing of transformers acts in training mode only.
        self.model.train(training and self.config.gradient_checkpointing)


def trained_tokens(batch: Trajectory) -> Tensor:
    """The tokens that the policy sampled, ``[B, L]`` bool."""
    if "loss_mask" not in batch:
        raise TrainingError("The batch has no loss_mask: nothing says which tokens the policy sampled.")
    return attended_tokens(batch) & (batch["loss_mask"] > 0)


def make_optimizer(model: nn.Module, config: OptimizerConfig, *, sharded: bool = False) -> torch.optim.AdamW:
    """AdamW over the parameters that train; weight decay only on matrices, not on norms and biases.

    Args:
        model: whose parameters are optimised.
        config: rates and decays.
        sharded: parameters are sharded by FSDP, for which the fused step is not used on CPUs.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    on_cpu = bool(trained) and trained[0].device.type == "cpu"
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=None if sharded and on_cpu else True,
    )


def learning_rate_factor(step: int, config: OptimizerConfig, total_steps: int | None) -> float:
    """What the peak learning rate is multiplied by in a step.

    Args:
        step: steps already made; 0 in the first.
        config: warm-up, schedule and where it ends.
        total_steps: steps of the run; None where unknown, which only a constant rate without warm-up allows.

    Returns:
        Warm-up grows linearly and reaches 1 in its last step, so that no step is made at rate 0.
    """
    if total_steps is None:
        return 1.0
    warmup = math.ceil(config.warmup_steps_proportion * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    falling = 1.0 - progress if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * falling


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, ft_spec: FinetuneSpec | None
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule of a run.

    Raises:
        ConfigError: the schedule depends on the length of the run, and that is not known.
    """
    total = ft_spec.total_steps if ft_spec is not None else None
    if not total and (config.lr_scheduler_type != "constant" or config.warmup_steps_proportion > 0):
        raise ConfigError(
            f"optimizer.lr_scheduler_type={config.lr_scheduler_type} with warmup_steps_proportion="
            f"{config.warmup_steps_proportion} needs the number of steps: pass a FinetuneSpec to initialize(), or use "
            "constant without warm-up."
        )
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, config, total or None))


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR
) -> dict[str, Any]:
    """Moments by parameter name, schedule and learning rates, whole on every rank."""
    moments: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if entry := optimizer.state.get(parameter):
            moments[name] = {key: parallel.full_tensor(value).detach().cpu().clone() for key, value in entry.items()}
    schedule = {
        key: value
        for key, value in scheduler.state_dict().items()
        if key != "lr_lambdas" and (isinstance(value, int | float | list) or value is None)
    }
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return {"optimizer": moments, "scheduler": schedule, "learning_rates": rates}


def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    state: dict[str, Any],
) -> None:
    """Set optimizer and schedule to what ``optimizer_state`` gave; moments are sharded as their parameters are."""
    for name, parameter in model.named_parameters():
        if (entry := state["optimizer"].get(name)) is not None:
            optimizer.state[parameter] = {
                key: value.clone() if value.dim() == 0 else parallel.placed_like(value, parameter).clone()
                for key, value in entry.items()
            }
    scheduler.load_state_dict({**scheduler.state_dict(), **state["scheduler"]})
    for group, rate in zip(optimizer.param_groups, state["learning_rates"], strict=True):
        group["lr"] = rate
