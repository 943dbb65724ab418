"""The policy that is trained: advantages, the steps of a policy update, and publication.

``FSDPPPOActor`` applies the algorithms of ``rollwright.algorithms`` that its config selects; ``TrainEngine`` scores and optimises.
``docs/training.md`` lists the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollwright.algorithms.advantages import Memory, estimate_by_role, find_estimator, returns_to_go
from rollwright.algorithms.gae import find_value_estimator, rewards_of_actions
from rollwright.algorithms.losses import (
    aggregation_weights,
    find_policy_loss,
    kl_estimate,
)
from rollwright.config.experiment import FinetuneSpec
from rollwright.config.recipes import apply_recipe, uses_critic
from rollwright.config.sections import CriticConfig, PPOActorConfig
from rollwright.errors import CheckpointError, TrainingError, WeightUpdateError
from rollwright.experience.contract import ROUTED_EXPERTS
from rollwright.experience.players import comparison_groups, trainable_rows
from rollwright.experience.trajectory import Trajectory, select_rows, tensor_container_to
from rollwright.inference.engine import InferenceEngine, WeightReceiver
from rollwright.rollout.engines import RolloutEngine
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.canary import Canary, Proof
from rollwright.training.critic import Critic, critic_for
from rollwright.training.distillation import Distillation
from rollwright.training.engine import TrainEngine, trained_tokens
from rollwright.training.micro_batches import split_minibatches
from rollwright.training.policy_update import ROW, PolicyUpdate, recomputes_logprobs
from rollwright.training.publish_and_audit import Publication, Publisher, SharedWeights, publisher_for
from rollwright.training.rank_shares import own_share

logger = getLogger("training")


class FSDPPPOActor(TrainEngine):
    """The policy, trained by policy gradients. The baseline comes from the rewards of the samples, or from a critic (``add_critic``).

    One step calls ``compute_logp`` (optional), ``compute_advantages``, ``ppo_update``, ``step_lr_scheduler`` and
    ``update_weights``, in this order.
    """

    config: PPOActorConfig
    drops_out = False

    def __init__(self, config: PPOActorConfig, model: nn.Module | None = None) -> None:
        """
        Args:
            config: the ``actor`` section.
            model: a loaded model. If None, ``initialize`` loads ``config.path``.

        Raises:
            ConfigError: the recipe or the loss is unknown or cannot be used with this config.
        """
        apply_recipe(config)
        self.policy_loss = find_policy_loss(config)
        self.estimator_memories: dict[str, Memory] = {}  #: what the advantage estimator keeps, by (environment, role)
        self._estimate: Any = find_value_estimator(config) if uses_critic(config) else find_estimator(config)
        self._distillation = Distillation(config.distillation)
        super().__init__(config, model)
        self.needs_reference = config.kl_ctl > 0
        self.critic: Critic | None = None  #: estimates the advantages of adv_estimator gae
        self._engine: Any = None
        self._meta: Any = None
        self._publisher: Publisher | None = None
        self.publication: Publication | None = None  #: the last transfer of weights to the engines; on rank 0
        self._proof: Proof | None = None  # of a canary since the last update
        self._warned: set[str] = set()

    def add_critic(self, config: CriticConfig, ft_spec: FinetuneSpec | None = None) -> None:
        """Load the critic that ``adv_estimator: gae`` needs. Call this after ``initialize``.

        Args:
            config: the ``critic`` section.
            ft_spec: length of the run, for the learning-rate schedule.

        Raises:
            ConfigError: ``adv_estimator`` has no critic, or the critic cannot be loaded.
        """
        self.critic = critic_for(self, config, self._estimate)
        self.critic.initialize(None, ft_spec)

    # One step's calls

    def compute_ref_logp(self, batch: Trajectory) -> Tensor:
        """Compute the log-probabilities ``[B, L]`` of trained tokens under the reference policy.

        Raises:
            TrainingError: there is no reference (``kl_ctl`` is 0).
        """
        if self.reference is None:
            raise TrainingError("There is no reference policy: actor.kl_ctl is 0. Set it above 0 before initialize().")
        # The recorded experts are the policy's; the reference routes as it does.
        batch = {name: value for name, value in batch.items() if name != ROUTED_EXPERTS}
        return self.reference.compute_logp(batch, loss_tokens_only=True)

    def compute_advantages(self, batch: Trajectory) -> Trajectory:
        """Compute the advantage of each trained token and write it to ``batch["advantages"]``, ``[B, L]``.

        Rows of different roles are never compared (``estimate_by_role``), nor are rows of different turns, where rows have ``turn_ids``.
        Rewards are shifted, scaled and clipped, written to ``returns [B]``, and passed to ``adv_estimator``; the estimator ``normalised``
        normalises them over samples as ``adv_norm`` specifies. With ``token_rewards [B, L]``, a token's return is the row's reward plus
        the token rewards from this token to the end of the row; the row's baseline and scale apply to all its tokens. Existing advantages
        (``[B]`` or ``[B, L]``, from a workflow, an operator or the caller) are kept. With ``kl_ctl > 0``, ``ref_logp`` is added too. With
        a teacher (``distillation``), advantages are weighted by ``reward_weight``, and those of the loss ``advantage`` are added.

        Args:
            batch: a trajectory with ``rewards [B]`` or ``advantages``. It needs ``group_ids`` if a level of ``adv_norm`` is ``group``, and
                ``sample_ids`` if samples have several rows.

        Returns:
            The same dict.

        Raises:
            TrainingError: a required key is missing, or the advantages have another shape.
        """
        mask_BL = self._update_mask(batch).float()
        if self.config.kl_ctl > 0 and "ref_logp" not in batch:
            batch["ref_logp"] = self.compute_ref_logp(batch)
        given = batch.get("advantages")
        uses_rewards = self._distillation.uses_rewards
        if self.critic is not None or (
            given is None and uses_rewards
        ):  # a critic is trained on the returns whatever else there is
            batch["advantages"] = self._estimated(batch, mask_BL)
        if given is None and not uses_rewards:
            batch["advantages"] = torch.zeros_like(mask_BL)
        if given is not None:
            given = given.float().to(mask_BL.device)
            if given.shape not in (mask_BL.shape, mask_BL.shape[:1]):
                raise TrainingError(
                    f"compute_advantages: the batch's advantages have the shape {list(given.shape)}; give one for each row, "
                    f"{list(mask_BL.shape[:1])}, or for each token, {list(mask_BL.shape)}."
                )
            batch["advantages"] = (given if given.ndim == 2 else given[:, None]) * mask_BL
        batch["advantages"] = self._distillation.mixed_advantages(batch, batch["advantages"], mask_BL)
        return batch

    def _estimated(self, batch: Trajectory, mask_BL: Tensor) -> Tensor:
        config = self.config
        rewards_B = _require(batch, "rewards", "compute_advantages").float().to(mask_BL.device)
        scaled_B = (rewards_B + config.reward_bias) * config.reward_scaling
        limit = torch.inf if config.reward_clip is None else config.reward_clip
        outcome_B = scaled_B.clamp(-limit, limit)
        batch["reward_clipped"] = scaled_B.abs() > limit
        count = torch.tensor(len(scaled_B), device=scaled_B.device)
        clipped, of_all = parallel.summed(torch.stack([batch["reward_clipped"].sum(), count])).tolist()
        if clipped:
            self._warn_once(
                "clip",
                f"actor.reward_clip={limit:g} cuts the rewards of {clipped} of {of_all} rows (the largest on rank 0 is "
                f"{float(scaled_B.abs().max()):g}), so differences between them are not learned. Raise it, set it to "
                "null, or lower actor.reward_scaling.",
            )
        token_rewards_BL = self._token_rewards(batch, mask_BL)
        later_BL = torch.zeros_like(mask_BL)
        if token_rewards_BL is not None:
            later_BL = returns_to_go(token_rewards_BL, torch.ones_like(mask_BL))
        if uses_critic(config):
            batch["returns"] = outcome_B + later_BL[:, 0]
            return self._require_critic().estimate(batch, rewards_of_actions(outcome_B, token_rewards_BL, mask_BL), mask_BL)
        norm = config.adv_norm if config.adv_estimator == "normalised" else None
        if norm is not None and "group" in (norm.mean_level, norm.std_level) and batch.get("group_ids") is None:
            raise TrainingError(
                "compute_advantages: the batch has no group_ids, so which rows are compared with each other is unknown. The "
                "executor fills them in; provide them, or set actor.adv_norm.mean_level and std_level to batch."
            )
        rows = torch.arange(len(rewards_B), device=mask_BL.device)
        batch["returns"] = outcome_B + later_BL[:, 0]
        returns_all, own = parallel.gathered_rows(batch["returns"])
        groups_all, _ = parallel.gathered_rows(_numbers_of_this_rank(batch.get("group_ids"), rows))
        samples_all, _ = parallel.gathered_rows(_numbers_of_this_rank(batch.get("sample_ids"), rows))
        roles_B, turns_B = (batch.get(key, torch.zeros_like(rows)).to(rows.device) for key in ("role_ids", "turn_ids"))
        roles_all, turns_all, trainable_all = (
            parallel.gathered_rows(each_B)[0] for each_B in (roles_B, turns_B, trainable_rows(batch).long().to(rows.device))
        )
        compared_all, trainable_all = comparison_groups(groups_all, roles_all, turns_all), trainable_all.bool()
        if norm is not None and norm.mean_level == "group":
            self._warn_of_lone_samples(compared_all[trainable_all], samples_all[trainable_all])
        baseline_all, scale_all = estimate_by_role(
            self._estimate, returns_all, compared_all, samples_all, roles_all, trainable_all, self.estimator_memories
        )
        return (outcome_B[:, None] + later_BL - baseline_all[own][:, None]) * scale_all[own][:, None] * mask_BL

    def _token_rewards(self, batch: Trajectory, mask_BL: Tensor) -> Tensor | None:
        """Return the rewards of tokens, ``[B, L]``: those of the batch, less the KL if it is taken from the reward. None if there are none."""
        config, rewards_BL = self.config, None
        if batch.get("token_rewards") is not None:
            rewards_BL = batch["token_rewards"].float().to(mask_BL.device) * config.reward_scaling
        if config.kl_ctl == 0 or config.kl_in == "loss":
            return rewards_BL
        if "prox_logp" not in batch and bool(batch.get("logprobs_shifted", torch.zeros(1)).any()):
            batch["prox_logp"] = self.compute_logp(batch, loss_tokens_only=True)
        own_BL = batch.get("prox_logp", batch["logprobs"]).float().to(mask_BL.device) * mask_BL
        penalty_BL = kl_estimate(own_BL, batch["ref_logp"].float().to(mask_BL.device) * mask_BL, config.kl_estimator) * mask_BL
        return -config.kl_ctl * penalty_BL if rewards_BL is None else rewards_BL - config.kl_ctl * penalty_BL

    def _require_critic(self) -> Critic:
        if self.critic is None:
            raise TrainingError(
                f"actor.adv_estimator is {self.config.adv_estimator}, which needs a critic: call add_critic(CriticConfig(...)) after "
                "initialize()."
            )
        return self.critic

    def _warn_of_lone_samples(self, groups_B: Tensor, samples_B: Tensor) -> None:
        group_of_sample = torch.stack([groups_B, samples_B]).unique(dim=1)[0]
        sizes = group_of_sample.unique(return_counts=True)[1]
        if alone := int((sizes == 1).sum()):
            self._warn_once(
                "alone",
                f"{alone} of {len(sizes)} groups have one sample: actor.adv_norm compares a sample with its group, so these "
                "have advantage 0 and train nothing. Set gconfig.n_samples (or the taskset's group_size) to 2 or more, or compare "
                "with the batch: actor.recipe=reinforceplusplus.",
            )

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned and parallel.rank() == 0:
            logger.warning("%s", message)
        self._warned.add(about)

    def ppo_update(self, batch: Trajectory) -> dict[str, float]:
        """Optimise the policy on a batch, in ``ppo_n_minibatches`` steps.

        Args:
            batch: a trajectory after ``compute_advantages``. If ``prox_logp`` (the trainer's own log-probabilities before the first
                step) is absent, it is computed if the config needs it. The update writes ``trainer_logprobs`` and ``entropies`` into the
                batch, both ``[B, L]`` and 0 at tokens that are not trained.

        Returns:
            Metrics of the update; ``docs/training.md`` lists them.

        Raises:
            TrainingError: a key is missing, log-probabilities are shifted and not recomputed, or too many steps were not finite.
        """
        config = self.config
        given, batch = batch, self.for_update(batch)
        of_critic: dict[str, float] = {}
        if self.critic is not None:
            of_critic = self.critic.update(batch)
            if self.critic.warms_up:
                return {"optimizer_steps": 0.0, "skipped_steps": 0.0, "lr": self.learning_rate, **of_critic}
        if recomputes_logprobs(config) and "prox_logp" not in batch and config.ppo_n_minibatches > 1:
            batch["prox_logp"] = self.compute_logp(batch, loss_tokens_only=True)
        update = PolicyUpdate(config, self.policy_loss, self.version, batch)
        given["trainer_logprobs"], given["entropies"] = update.logprobs_BL, update.entropies_BL
        steps = []
        for rows in split_minibatches(batch, config.ppo_n_minibatches):
            minibatch = select_rows(batch, rows)
            if float(parallel.summed(minibatch["update_mask"].sum())) == 0:
                continue  # every token is masked: a step would only decay weights
            minibatch["loss_weights"] = self.loss_weights(minibatch)
            if config.positive_nll_coef > 0:
                minibatch["positive_weights"] = self.positive_weights(minibatch)
            minibatch[ROW] = rows.to(self.device)
            update.before_first_step = not steps
            steps.append(self.optimise(minibatch, update.loss, with_entropy=True, entropy_gradient=config.entropy_coef > 0))
        return {**update.metrics(steps, self.learning_rate), **self.probe_metrics(), **of_critic}

    def probe_metrics(self) -> dict[str, float]:
        """Return the largest mean difference that the last audit of the engines found, and what the canary found since the last call."""
        agreements = self._publisher.agreements if self._publisher is not None else []
        audited = {"logprob_difference/probe": max(each.mean for each in agreements)} if agreements else {}
        proof, self._proof = self._proof, None
        return audited if proof is None else {**audited, **proof.metrics()}

    def for_update(self, batch: Trajectory) -> Trajectory:
        """Return a copy of a batch on the device, with ``update_mask`` and all columns that the policy loss reads.

        Raises:
            TrainingError: a key is missing, or log-probabilities are shifted and not recomputed.
        """
        config = self.config
        _require(batch, "advantages", "a policy update", "call compute_advantages(batch) first")
        _require(batch, "logprobs", "a policy update")
        self._distillation.require_scores(batch, "a policy update")
        batch = tensor_container_to(dict(batch), self.device)
        batch["update_mask"] = self._update_mask(batch).float()
        is_anchored = "prox_logp" in batch or recomputes_logprobs(config)
        if not is_anchored and bool(batch.get("logprobs_shifted", torch.zeros(1)).any()):
            raise TrainingError(
                f"a policy update: the log-probabilities of {int(batch['logprobs_shifted'].sum())} of {len(batch['rewards'])} rows were taken "
                "after top-p, top-k or penalties (rollout.accept_shifted_logprobs), and are not the policy's: set "
                "actor.recompute_logprob, so that the trainer's own take their place."
            )
        if config.kl_ctl > 0 and "ref_logp" not in batch:
            batch["ref_logp"] = self.compute_ref_logp(batch)
        return batch

    def loss_weights(self, batch: Trajectory) -> Tensor:
        """Return the weight of each token in the loss, ``[B, L]``, as ``loss_aggregation`` specifies, over all ranks. Collective."""
        config, mask_BL = self.config, batch.get("update_mask")
        mask_BL = self._update_mask(batch).float() if mask_BL is None else mask_BL
        return aggregation_weights(mask_BL, config.loss_aggregation, constant=config.loss_constant, reduce=parallel.summed)

    def before_update(self) -> None:
        """Pause an engine that shares the weights until they are published, or run an audit that is due. Collective."""
        if self._publisher is not None:
            self._publisher.before_first_step()

    def positive_weights(self, minibatch: Trajectory) -> Tensor:
        """Return the weights ``[B, L]`` of a mean over the trained tokens of rows with a reward above 0, on all ranks."""
        returns_B = minibatch.get("returns", minibatch["rewards"]).to(self.device)
        return aggregation_weights(minibatch["update_mask"] * (returns_B > 0)[:, None], "token", reduce=parallel.summed)

    def step_lr_scheduler(self) -> None:
        """Advance the learning-rate schedules of the policy and the critic by one step of the run."""
        super().step_lr_scheduler()
        if self.critic is not None:
            self.critic.step_lr_scheduler()

    def state_dict(self) -> dict[str, Any]:
        """See ``TrainEngine.state_dict``; the state of the critic and what the advantage estimator keeps are included."""
        critic = {} if self.critic is None else {"critic": self.critic.state_dict()}
        memories = {role: dict(memory) for role, memory in self.estimator_memories.items()}
        return {**super().state_dict(), **critic, "estimator_memories": memories}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``TrainEngine.load_state_dict``.

        Raises:
            CheckpointError: the state belongs to another model, or to a run with a critic while this one has none, or the reverse.
        """
        if ("critic" in state) != (self.critic is not None):
            has, lacks = ("the checkpoint", "this run") if "critic" in state else ("this run", "the checkpoint")
            raise CheckpointError(f"{has} has a critic and {lacks} has none: resume with the same actor.adv_estimator.")
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        super().load_state_dict(state)
        self.estimator_memories = {role: dict(memory) for role, memory in state.get("estimator_memories", {}).items()}

    def save_critic(self, path: str | Path, tokenizer: Any = None) -> None:
        """Write the critic in Hugging Face form, if it is a model of its own (see ``Critic.save``). Collective."""
        if self.critic is None or not self.critic.is_own_model:
            return
        if not self.critic.can_be_saved:
            kind = self.critic.model.config.model_type
            logger.warning(
                "The critic is not written to %s: transformers has no model for sequence classification of the type %r. The recovery "
                "checkpoint has it.",
                path,
                kind,
            )
            return
        self.critic.save(path, tokenizer)

    def destroy(self) -> None:
        """Free the memory of the models and optimizers."""
        if self.critic is not None:
            self.critic.destroy()
        super().destroy()

    def _update_mask(self, batch: Trajectory) -> Tensor:
        mask_BL = trained_tokens(batch)
        if self.config.mask_truncated:
            truncated_B = _require(batch, "truncated", "mask_truncated").bool().to(mask_BL.device)
            mask_BL = mask_BL & ~truncated_B[:, None]
        return mask_BL

    # Publication

    def connect_engine(self, engine: Any = None, meta: Any = None) -> None:
        """Connect the inference engine that samples with this policy.

        Args:
            engine: an engine in this process, or a client of servers. Only the first rank uses it; other ranks may pass None.
            meta: how to transfer weights. If None, the transfer is chosen to fit the engine.
        """
        if engine is None and parallel.rank() > 0:
            engine = WeightReceiver()
        self._engine, self._meta = engine, meta
        self._publisher = publisher_for(self, engine, meta)

    def sample(self, tasks: Any, workflow: Any, workflow_kwargs: dict[str, Any] | None = None, **options: Any) -> Trajectory:
        """Sample a batch with the connected rollout engine. Collective: the first rank samples, and each rank gets whole groups.

        Args:
            tasks: a list of tasks, each of which is run once (``rollout_batch``). Or a loader, from which a batch is drawn while sampling
                runs ahead of training as far as ``rollout.max_head_offpolicyness`` allows (``prepare_batch``).
            workflow, workflow_kwargs: what runs a task, and its constructor arguments.
            options: other arguments of these methods, such as ``group_size``.

        Returns:
            This rank's rows, on ``device``.

        Raises:
            TrainingError: no rollout engine is connected.
            RolloutError: no group was accepted.
        """
        if parallel.rank() > 0:
            return tensor_container_to(own_share(None), self.device)
        if not isinstance(self._engine, RolloutEngine):
            found = "no engine" if self._engine is None else type(self._engine).__name__
            raise TrainingError(
                f"sample: {found} is connected, which runs no workflows: call connect_engine with a rollout engine, such as "
                "LocalRolloutEngine or RemoteSGLangEngine."
            )
        draw = self._engine.rollout_batch if isinstance(tasks, list | tuple) else self._engine.prepare_batch
        batch = draw(tasks, workflow, workflow_kwargs, **options)
        return tensor_container_to(own_share(batch, self.config.ppo_n_minibatches), self.device)

    def publish(self, meta: Any = None) -> None:
        """Publish the current weights as ``version + 1`` while sampling is paused; see ``update_weights``. Collective."""
        engine = self._engine if isinstance(self._engine, InferenceEngine) else None
        if engine is not None:
            engine.pause()
        self.update_weights(meta)
        if engine is not None:
            engine.resume()
            engine.set_version(self.version)

    def update_weights(self, meta: Any = None) -> None:
        """Publish the current weights as ``version + 1``; on return the engines sample with them.

        Args:
            meta: a ``WeightUpdateMeta``. If None, the one passed to ``connect_engine`` is used.

        Raises:
            WeightUpdateError: there is no engine, or it did not confirm the version.
        """
        if self.shares_gpu:  # the servers are about to take their memory again
            torch.cuda.empty_cache()
        if self._publisher is None or (meta is not None and meta != self._meta):
            self._meta = meta if meta is not None else self._meta
            before, self._publisher = self._publisher, publisher_for(self, self._engine, self._meta)
            if isinstance(before, SharedWeights):
                self._publisher = before.succeeded_by(self._publisher)
        self._publisher.publish(self, self.version + 1)
        self.publication = self._publisher.publication
        self.version += 1

    def republish(self) -> None:
        """Publish the current weights under their current version, at the start of a run and after ``load_state_dict``."""
        if self._publisher is None:
            self._publisher = publisher_for(self, self._engine, self._meta)
        self._publisher.publish(self, self.version)
        self.publication = self._publisher.publication

    def prove_publication(self) -> None:
        """Do the same as ``republish``, and prove with a test publication that the engines compute with every tensor (``Canary``).

        Raises:
            WeightUpdateError: an engine does not; the message names the kind of tensor.
        """
        if self._publisher is None:
            self._publisher = publisher_for(self, self._engine, self._meta)
        self._proof = Canary(self, self._publisher).prove()
        self.publication = self._publisher.publication

    @property
    def awaits_proof(self) -> bool:
        """True on the first rank if an engine that was started again waits for ``prove_publication``."""
        return self._publisher is not None and self._publisher.engine.sampler.awaits_proof(self.version)

    def skip_publication(self) -> None:
        """Count an update without publishing it; the engines keep the weights they have.

        Tokens keep the version that sampled them, so staleness counts all updates, published or not.
        """
        self.version += 1

    def get_version(self) -> int:
        """Return the number of updates that these weights have seen, including updates that were not published."""
        return self.version

    def set_version(self, version: int) -> None:
        """Confirm the version that ``update_weights`` published.

        Raises:
            WeightUpdateError: ``version`` differs from the published version.
        """
        if version != self.version:
            raise WeightUpdateError(
                f"set_version({version}), but update_weights has published version {self.version}: publication counts "
                "versions by itself, so call update_weights once for each step and set_version with that number, or not at all."
            )


def _require(batch: Trajectory, key: str, where: str, remedy: str = "the data contract has it; see docs/training.md") -> Tensor:
    if batch.get(key) is None:
        raise TrainingError(f"{where}: the batch has no {key!r} (it has {', '.join(sorted(batch))}); {remedy}.")
    return batch[key]


def _numbers_of_this_rank(ids: Tensor | None, rows: Tensor) -> Tensor:
    """Map ids to numbers that no other rank uses. If ``ids`` is None, each row gets its own number."""
    numbers = rows if ids is None else torch.unique(ids.to(rows.device), return_inverse=True)[1]
    return numbers + parallel.rank() * (1 << 32)
