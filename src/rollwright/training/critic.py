"""The critic of PPO: a model with a value head, which estimates the advantages of a batch and is trained on its returns.

The value of a token is that of the state before the token was sampled, so it comes from the same hidden state as the token's
log-probability. A new critic's value head is 0: until it has been trained, the advantage of a token is its return.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rollwright.algorithms.gae import ValueEstimator, explained_variance, value_loss
from rollwright.algorithms.losses import aggregation_weights
from rollwright.config.sections import SHARED_CRITIC_KEYS, CriticConfig, TrainEngineConfig
from rollwright.errors import ConfigError, TrainingError
from rollwright.experience.contract import MULTI_MODAL, ROUTED_EXPERTS
from rollwright.experience.trajectory import Trajectory, select_rows, tensor_container_to
from rollwright.training import parallel
from rollwright.training.engine import TrainEngine, trained_tokens
from rollwright.training.fsdp import is_sharded, shard, with_whole_weights
from rollwright.training.hf_checkpoint import CLASSIFIERS, HEAD, classifier_of, load_weights, read_tensor, save_classifier
from rollwright.training.logprobs import TokenScorer
from rollwright.training.micro_batches import MINIBATCH_IDS, split_minibatches
from rollwright.training.parallel import TokenStatistics, sharded_like

#: Columns that a model's forward pass reads.
_INPUTS = ("input_ids", "attention_mask", "loss_mask", "position_ids", MULTI_MODAL, ROUTED_EXPERTS)


def critic_for(actor: TrainEngine, config: CriticConfig, estimate: Any) -> Critic:
    """Make the critic of an initialised actor; ``initialize`` loads it.

    Args:
        actor: the policy.
        config: the ``critic`` section.
        estimate: the result of ``find_value_estimator``.
    """
    if config.shared:
        return SharedCritic(actor, config, estimate)
    if config.path:
        critic = Critic(config, estimate)
    elif actor.config.path and not actor.config.init_from_scratch:
        critic = Critic(dataclasses.replace(config, path=actor.config.path), estimate)
    elif actor.adapter is not None or is_sharded(actor.model):
        why = "has an adapter to train" if actor.adapter is not None else "is sharded"
        raise ConfigError(
            f"critic.path is empty, and the actor's first weights, with which the critic would begin, are in no file, and its model {why}: "
            "set critic.path or critic.shared."
        )
    else:
        critic = Critic(config, estimate, copy.deepcopy(actor.model))
    critic.shares_weights = actor.shares_weights
    return critic


class ValueScorer(TokenScorer):
    """A causal model whose output layer has one row, as a function from tokens to values."""

    check_options: ClassVar[dict[str, Any]] = {"is_check": True}
    replays_experts = False  # a critic of its own routes as it does

    def forward(
        self,
        batch: Trajectory,
        wanted_BL: Tensor,
        *,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
        is_check: bool = False,
        candidates_BLK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the value of the state before each wanted token, and after each token of ``batch["ends"]``.

        Args:
            batch: see ``TokenScorer.forward``; and optionally ``ends [B, L]``, the last token of rows that a limit cut.
            wanted_BL: bool mask of the tokens; column 0 must be false.
            with_entropy, entropy_gradient, candidates_BLK: not used; a critic has no distribution.
            is_check: apply a fixed head of ones and minus ones, because two ways to compute a row always agree under a head of 0.

        Returns:
            Values before wanted tokens and values after the ends, both ``[B, L]`` in at least float32, and 0 at other tokens.
        """
        del with_entropy, entropy_gradient, candidates_BLK
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        return _values(batch, wanted_BL, self.hidden_states(batch, wanted_BL), head.weight, is_check)


def _values(
    batch: Trajectory, wanted_BL: Tensor, hidden_TH: Tensor, weight_1H: Tensor, is_check: bool
) -> tuple[Tensor, Tensor]:
    """Apply a value head to hidden states, in at least float32 whatever the autocast type is."""
    dtype = torch.promote_types(weight_1H.dtype, torch.float32)
    if is_check:
        signs_H = 1.0 - 2.0 * (torch.arange(hidden_TH.shape[-1], device=hidden_TH.device) % 2)
        weight_1H = signs_H[None] / math.sqrt(hidden_TH.shape[-1])
    values_T = (hidden_TH.to(dtype) * weight_1H.to(dtype)).sum(-1)
    empty_BL, count = values_T.new_zeros(wanted_BL.shape), int(wanted_BL.sum())
    before_BL = empty_BL.index_put(wanted_BL.nonzero(as_tuple=True), values_T[:count])
    if batch.get("ends") is None:
        return before_BL, empty_BL
    ends = (batch["ends"] & batch["attention_mask"].bool()).nonzero(as_tuple=True)
    return before_BL, empty_BL.index_put(ends, values_T[count:])


class Critic(TrainEngine):
    """A model of its own that computes values, estimates advantages, and is trained on returns.

    One step calls ``estimate`` and then ``update``, before the policy is updated.
    """

    config: CriticConfig
    #: False for a head on the actor's model, which cannot be saved alone.
    is_own_model = True

    def __init__(self, config: CriticConfig, estimate: ValueEstimator, model: nn.Module | None = None) -> None:
        """
        Args:
            config: the ``critic`` section.
            estimate: maps rewards and values to advantages and returns.
            model: a loaded causal model, whose output layer is replaced. If None, ``initialize`` loads ``config.path``.
        """
        super().__init__(config, model)
        self._estimate = estimate

    @property
    def warms_up(self) -> bool:
        """True if the last ``update`` was one of the first steps of the run, in which only the critic is trained."""
        return self.version <= self.config.warmup_steps

    # One step's calls

    @torch.no_grad()
    def compute_values(self, batch: Trajectory) -> tuple[Tensor, Tensor]:
        """Compute the values of a batch's states under the current weights.

        Returns:
            The value ``[B, L]`` of the state before each trained token, and the value ``[B]`` of the state after each row that a limit cut
            (0 for the other rows), both float32.
        """
        batch = tensor_container_to(dict(batch), self.device)
        wanted_BL = trained_tokens(batch)
        inputs = {name: batch[name] for name in _INPUTS if batch.get(name) is not None} | {"_wanted": wanted_BL}
        inputs["ends"] = _ends_of_cut_rows(batch)
        values_BL = torch.zeros(wanted_BL.shape, dtype=torch.float32, device=self.device)
        after_B = torch.zeros(len(wanted_BL), dtype=torch.float32, device=self.device)
        self._run_mode(training=False)
        with self._autocast():
            for index, part in self.division.micro_batches(self._scorer, inputs):
                before_BL, ends_BL = self._scorer(part, part["_wanted"])
                if len(index):
                    values_BL[index, : before_BL.shape[1]] = before_BL.float()
                    after_B[index] = ends_BL.sum(1).float()
        return values_BL, after_B

    def estimate(self, batch: Trajectory, rewards_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Estimate the advantages of a batch. Writes ``values`` and ``value_targets``, both ``[B, L]``, into the batch. Collective.

        Args:
            batch: the rows.
            rewards_BL: reward of each trained token.
            mask_BL: 1 for trained tokens.

        Returns:
            Advantages ``[B, L]``, 0 at tokens that are not trained.

        Raises:
            TrainingError: a row has isolated branches, whose tokens have no single next token.
        """
        branches = batch.get("branch_ids")
        if branches is not None and bool((branches > 0).any()):
            raise TrainingError(
                "actor.adv_estimator is gae, but the batch has rows with isolated branches (branch_ids), whose tokens do not follow each "
                "other: return one row for each branch, or use another recipe, such as grpo."
            )
        values_BL, after_B = self.compute_values(batch)
        rewards_BL, mask_BL = rewards_BL.to(values_BL), mask_BL.to(values_BL.device)
        advantages_BL, returns_BL = self._estimate(rewards_BL, values_BL, mask_BL, after_B, parallel.summed)
        batch["values"], batch["value_targets"] = values_BL * mask_BL, returns_BL
        return advantages_BL

    def update(self, batch: Trajectory) -> dict[str, float]:
        """Train the critic on the returns of a batch, in ``ppo_n_minibatches`` steps. Collective.

        Args:
            batch: a trajectory on ``device`` after ``estimate``, with ``update_mask``.

        Returns:
            Metrics whose names begin with ``critic/``; ``docs/training.md`` lists them.

        Raises:
            TrainingError: ``estimate`` was not called, or too many steps were not finite.
        """
        if batch.get("value_targets") is None:
            raise TrainingError("The critic has no targets for this batch: call compute_advantages(batch) first.")
        statistics, steps = TokenStatistics(self.device), []
        for rows in self._minibatches(batch):
            minibatch = select_rows(batch, rows)
            if float(parallel.summed(minibatch["update_mask"].sum())) == 0:
                continue
            minibatch["loss_weights"] = aggregation_weights(minibatch["update_mask"], "token", reduce=parallel.summed)
            steps.append(self.optimise(minibatch, partial(self._loss, statistics)))
        self.version += 1
        return {f"critic/{name}": value for name, value in self._metrics(batch, statistics, steps).items()}

    def _minibatches(self, batch: Trajectory) -> list[Tensor]:
        """Return the rows of each optimizer step. A rank's share of a batch is divided by the actor's minibatches."""
        count, numbers_B = self.config.ppo_n_minibatches, batch.get(MINIBATCH_IDS)
        if count == 1 or parallel.world_size() == 1:
            return split_minibatches({name: value for name, value in batch.items() if name != MINIBATCH_IDS}, count)
        if numbers_B is None:
            numbers_B = torch.zeros(len(batch["input_ids"]), dtype=torch.int64, device=self.device)
        of_actor = parallel.largest(int(numbers_B.max()) if len(numbers_B) else 0, self.device) + 1
        if of_actor % count:
            raise TrainingError(
                f"critic.ppo_n_minibatches is {count}, but several ranks share a batch out by the actor's minibatches: set it to a divisor "
                f"of actor.ppo_n_minibatches ({of_actor})."
            )
        return split_minibatches({**batch, MINIBATCH_IDS: numbers_B * count // of_actor}, count)

    def _loss(self, statistics: TokenStatistics, part: Trajectory, values_BL: Tensor, _: Tensor) -> Tensor:
        """Compute the weighted sum of a micro-batch's value losses."""
        weights_BL = part["loss_weights"]
        old_BL, returns_BL = part["values"].to(values_BL.dtype), part["value_targets"].to(values_BL.dtype)
        loss_BL, clipped_BL = value_loss(values_BL, old_BL, returns_BL, self.config.eps_clip)
        statistics.mean("clip_share", clipped_BL.float(), weights_BL != 0)
        return (weights_BL * loss_BL).sum()

    def _metrics(self, batch: Trajectory, statistics: TokenStatistics, steps: list[dict[str, float]]) -> dict[str, float]:
        """Compute the metrics of an update. Values are those before its first step."""
        mask_BL, values_BL, returns_BL = (batch[name] for name in ("update_mask", "values", "value_targets"))
        statistics.mean("returns/mean", returns_BL, mask_BL)
        statistics.mean("values/mean", values_BL, mask_BL)
        statistics.mean("squared_error", (values_BL - returns_BL).square(), mask_BL)
        explained = explained_variance(values_BL, returns_BL, mask_BL, parallel.summed)
        made = [step for step in steps if not step["skipped_steps"]]
        means = {name: sum(step[name] for step in made) / len(made) for name in ("loss", "grad_norm")} if made else {}
        counts = {"optimizer_steps": float(len(made)), "skipped_steps": float(len(steps) - len(made))}
        known = {} if math.isnan(explained) else {"explained_variance": explained}
        return {**counts, **means, **known, "lr": self.learning_rate, **statistics.export()}

    # The model

    def save(self, path: str | Path, tokenizer: Any = None) -> None:
        """Write the critic as a model for sequence classification with one label, which ``critic.path`` loads with its head. Collective.

        Transformers' class scores the last token of a sequence. Its output at every token is the value of the state after that token.

        Raises:
            ConfigError: transformers has no such class for the architecture.
        """
        head = self.model.get_output_embeddings().weight
        name = next(name for name, parameter in self.model.named_parameters() if parameter is head)
        with_whole_weights(self.weights(), lambda weights: save_classifier(self.model, path, weights, name, tokenizer))

    @property
    def can_be_saved(self) -> bool:
        """True if ``save`` can write the model in Hugging Face form."""
        return classifier_of(self.model) is not None

    def _load(self, shards: bool, like: TrainEngine | None = None) -> None:
        super()._load(shards, like)
        self._load_head()

    @torch.no_grad()
    def _load_head(self) -> None:
        """Load the value head of a model for classification. Other models have none, and the head stays 0."""
        config = self.model.config
        kinds = [name for name in config.architectures or () if name.endswith(CLASSIFIERS)]
        if not kinds or not self.config.path or self.config.init_from_scratch:
            return
        head, values = self.model.get_output_embeddings().weight, read_tensor(self.config.path, HEAD)
        if values is None or values.shape != head.shape:
            found = "none" if values is None else f"one of the shape {list(values.shape)}"
            raise ConfigError(
                f"critic.path {self.config.path} is a {kinds[0]}, whose head would be the value head, but instead of {HEAD} of the shape "
                f"{list(head.shape)} it has {found}: name a model with one label, or a causal language model."
            )
        head.copy_(sharded_like(values.to(head.dtype), head))

    @torch.no_grad()
    def _adapt(self, like: TrainEngine | None) -> None:
        """Replace the output layer by a value head of 0."""
        head = self.model.get_output_embeddings() if hasattr(self.model, "get_output_embeddings") else None
        if head is None or not hasattr(head, "weight") or getattr(self.model, "base_model", self.model) is self.model:
            raise ConfigError(f"critic: {type(self.model).__name__} has no output layer that a value head could replace.")
        weight = head.weight
        new = nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=weight.dtype)
        new.weight.zero_()
        for part in (self.model.config, self.model.config.get_text_config()):
            part.tie_word_embeddings = False
        self.model.set_output_embeddings(new)

    def _new_scorer(self) -> nn.Module:
        return ValueScorer(self.model)

    @torch.no_grad()
    def _load_weights(self) -> None:
        """Load all weights except those of the head, which the checkpoint does not have."""
        head = self.model.get_output_embeddings()
        self.model.set_output_embeddings(nn.Identity())
        try:
            load_weights(self.model, self.config.path)
        finally:
            self.model.set_output_embeddings(head)
        head.weight.zero_()


class ValueHead(nn.Linear):
    """The weights of a critic that computes with the actor's model."""

    def __init__(self, hidden_size: int, config: Any, device: torch.device) -> None:
        super().__init__(hidden_size, 1, bias=False, device=device, dtype=torch.float32)
        self.config = config
        nn.init.zeros_(self.weight)


class SharedValueScorer(nn.Module):
    """A value head on the hidden states of the actor's model, through which no gradient flows."""

    check_options: ClassVar[dict[str, Any]] = ValueScorer.check_options

    def __init__(self, actor: TrainEngine, head: ValueHead) -> None:
        super().__init__()
        self.head = head
        self._actor = [actor]  # in a list, so that its parameters are not this module's

    @property
    def model(self) -> Any:
        """The actor's model, by whose properties batches are divided."""
        return self._actor[0].model

    @property
    def frequencies_vary(self) -> bool:
        """See ``TokenScorer.frequencies_vary``."""
        return self._actor[0]._scorer.frequencies_vary

    def forward(
        self,
        batch: Trajectory,
        wanted_BL: Tensor,
        *,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
        is_check: bool = False,
        candidates_BLK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``ValueScorer.forward``."""
        del with_entropy, entropy_gradient, candidates_BLK
        with torch.no_grad():
            hidden_TH, _ = self._actor[0]._scorer(batch, wanted_BL, hidden=True)
        return _values(batch, wanted_BL, hidden_TH, self.head.weight, is_check)


class SharedCritic(Critic):
    """A value head on the actor's last hidden states. Its features change with the policy; only the head is trained by the value loss.

    Args:
        actor: the initialised policy.
        config: the ``critic`` section.
        estimate: maps rewards and values to advantages and returns.
    """

    is_own_model = False

    def __init__(self, actor: TrainEngine, config: CriticConfig, estimate: ValueEstimator) -> None:
        of_actor = {
            each.name: getattr(actor.config, each.name)
            for each in dataclasses.fields(TrainEngineConfig)
            if each.name not in SHARED_CRITIC_KEYS
        }
        super().__init__(dataclasses.replace(config, **{**of_actor, "lora": None}), estimate)
        self._actor = actor
        self.shares_weights = actor.shares_weights

    def _load(self, shards: bool, like: TrainEngine | None = None) -> None:
        trunk = self._actor.model
        if getattr(trunk, "base_model", trunk) is trunk:
            raise ConfigError(f"critic.shared is true, but {type(trunk).__name__} has no hidden states below its output layer.")
        self.model = ValueHead(trunk.config.get_text_config().hidden_size, trunk.config, self.device)
        self._scorer = SharedValueScorer(self._actor, self.model)
        if shards:
            shard(self._scorer, [], torch.float32, self.config, self.device)


def _ends_of_cut_rows(batch: Trajectory) -> Tensor:
    """Return the bool mask ``[B, L]`` of the last token of each row that a length limit cut."""
    attended_BL = batch["attention_mask"].bool()
    last_BL = attended_BL & ~nn.functional.pad(attended_BL, (0, 1))[:, 1:]
    truncated = batch.get("truncated")
    if truncated is None:
        raise TrainingError(
            "The batch has no 'truncated', so it is unknown after which rows the critic's value counts; see docs/training.md."
        )
    return last_BL & truncated.bool().to(attended_BL.device)[:, None]
