"""Signs that a run cannot learn: settings that are seen before the first step, and steps that move nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollwright.tracking.logging import getLogger

logger = getLogger("trainer")

#: AdamW moves a weight by about this much a step; the weights of a language model are mostly below 0.1.
LARGEST_LEARNING_RATE = 1e-2

#: Steps in a row in which nothing was learned, after which it is told.
STEPS_WITHOUT_LEARNING = 5

#: Below it an advantage is rounding.
_NO_ADVANTAGE = 1e-6


def reasons_not_to_learn(config: Any) -> Iterator[str]:
    """What of an experiment's settings keeps it from learning, each with the key and what to change.

    A process that only explores, or only trains from a store, is judged by what it does.
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


def warn_of_reasons(config: Any) -> None:
    """Log every reason once, at the start of a run."""
    for reason in reasons_not_to_learn(config):
        logger.warning("this run can hardly learn: %s", reason)


class LearningWatch:
    """Tells once when several steps in a row had nothing to learn from."""

    def __init__(self) -> None:
        self._idle = 0
        self._has_told = False

    def after_step(self, stats: Mapping[str, float], reward: float) -> None:
        """Note a step.

        Args:
            stats: of ``ppo_update``.
            reward: mean of the step.
        """
        self._idle = self._idle + 1 if stats.get("advantage/abs_mean", 0.0) < _NO_ADVANTAGE else 0
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
