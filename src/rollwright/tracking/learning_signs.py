"""Settings with which a run can hardly learn, and steps without an update; ``curve_signs`` has what the curves say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollwright.tracking.curve_signs import STEPS_WITHOUT_LEARNING
from rollwright.tracking.logging import getLogger
from rollwright.tracking.readable import NO_ADVANTAGE

logger = getLogger("trainer")

#: AdamW moves a weight by about this much a step; the weights of a language model are mostly below 0.1.
LARGEST_LEARNING_RATE = 1e-2


def reasons_not_to_learn(config: Any) -> Iterator[str]:
    """Yield messages about settings that keep an experiment from learning, each with its key and a remedy.

    A process that only explores, or only trains from a store, is checked only for the settings it uses.
    """
    actor, mode = getattr(config, "actor", None), getattr(config, "mode", "both")
    if actor is not None and mode != "train":
        own = [(f"tasksets[{number}].gconfig", each.gconfig) for number, each in enumerate(config.tasksets) if each.gconfig]
        everywhere = len(own) < len(config.tasksets) or not config.tasksets
        for place, gconfig in [*own, *([("gconfig", config.gconfig)] if everywhere else [])]:
            if gconfig.is_greedy:
                yield (
                    f"{place} has {'greedy: true' if gconfig.greedy else 'temperature: 0'}: all samples of a task are the same, so "
                    "that none is better than another. Set greedy to false and a temperature such as 1.0; evaluation has its own "
                    "arguments in evaluator.gconfig."
                )
    if mode == "explore":
        return
    trained, section = (config.model, "model") if actor is None else (actor, "actor")
    if trained.optimizer is not None and trained.optimizer.lr > LARGEST_LEARNING_RATE:
        yield (
            f"{section}.optimizer.lr is {trained.optimizer.lr:g}: AdamW moves every weight by about that much a step, which destroys a "
            f"model. Set it to {LARGEST_LEARNING_RATE:g} or less; 1e-6 to 1e-4 is usual."
        )
    if actor is not None and actor.reward_scaling == 0:
        yield "actor.reward_scaling is 0: all rewards become the same. Set it to 1, or to what brings rewards near 1."


# -- while it trains -----------------------------------------------------------------------------------------------------


def warn_of_reasons(config: Any) -> None:
    """Log every reason why a run can hardly learn."""
    for reason in reasons_not_to_learn(config):
        logger.warning("this run can hardly learn: %s", reason)


class LearningWatch:
    """Warns once if several consecutive steps had nothing to learn from: no advantages, no teacher's loss, and no critic to warm up."""

    def __init__(self) -> None:
        self._idle = 0
        self._has_told = False

    def after_step(self, stats: Mapping[str, float], reward: float) -> None:
        """Record a step.

        Args:
            stats: result of ``ppo_update``.
            reward: mean reward of the step.
        """
        warms_up = "advantage/abs_mean" not in stats and stats.get("critic/optimizer_steps", 0.0) > 0
        learns = stats.get("advantage/abs_mean", 0.0) >= NO_ADVANTAGE or "teacher/loss" in stats or warms_up
        self._idle = 0 if learns else self._idle + 1
        if self._idle >= STEPS_WITHOUT_LEARNING and not self._has_told:
            self._has_told = True
            why = "every sampled token is masked (actor.mask_truncated?)"
            if stats.get("optimizer_steps") or stats.get("skipped_steps"):
                why = f"no group has samples of different rewards (the mean reward is {reward:.3g})"
            logger.warning(
                "nothing was learned in %d steps in a row: %s. Tasks that always or never succeed teach nothing: choose easier or "
                "harder ones, look at the reward function and at rollouts/, or sample more (gconfig.n_samples, temperature).",
                STEPS_WITHOUT_LEARNING,
                why,
            )
