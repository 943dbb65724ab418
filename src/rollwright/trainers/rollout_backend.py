"""Which inference engine a run samples from: a choice of the config, logged, never a silent fallback."""

from __future__ import annotations

from typing import Any

from rollwright.config.experiment import PPOConfig
from rollwright.rollout.engines import LocalRolloutEngine, RolloutEngine
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory

logger = getLogger("rollout")


def make_local_engine(config: Any, actor: Any, tokenizer: Any) -> LocalRolloutEngine:
    """The built-in engine in this process, sharing the weights of ``actor``."""
    return LocalRolloutEngine(
        config.rollout, model=actor.model, tokenizer=tokenizer, seed=config.seed, deterministic=config.deterministic
    )


def make_engine_alone(config: Any, tokenizer: Any) -> LocalRolloutEngine:
    """The built-in engine over the model at ``config.path``."""
    return LocalRolloutEngine(
        config.rollout, model=config.path, tokenizer=tokenizer, seed=config.seed, deterministic=config.deterministic
    )


def make_rollout_engine(config: PPOConfig, actor: Any, tokenizer: Any, directory: RunDirectory) -> RolloutEngine:
    """The engine that ``config.rollout.backend`` names."""
    logger.info("sampling with the %s engine", config.rollout.backend)
    if config.rollout.backend == "builtin":
        return make_local_engine(config, actor, tokenizer)
    raise NotImplementedError
