"""Reads AReaL's config files. They have the same structure as this project's, so most keys need no translation.

An AReaL file (``PPOConfig``) switches PPO on by its ``critic`` section. Here ``actor.recipe`` does, so the keys that the section implies are
added.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rollwright.config.overrides import merge_overrides
from rollwright.config.source import ConfigDialect, Document, KeyPath, Origins, Override, Written, dotted, plain
from rollwright.errors import ConfigError

#: Keys of PPO that have another place here.
MOVED: dict[KeyPath, KeyPath] = {
    ("actor", "discount"): ("actor", "adv_estimator_kwargs", "gamma"),
    ("actor", "gae_lambda"): ("actor", "adv_estimator_kwargs", "lam"),
    ("actor", "adv_norm"): ("actor", "adv_estimator_kwargs", "whiten"),
}
#: Keys that only files in this project's own form have.
_OWN = ("stages", "kind", "mode", "tasksets")


class AReaL(ConfigDialect):
    """AReaL's keys."""

    system: ClassVar[str] = "AReaL"
    #: Only names whose meaning is the same.
    renamed: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "IntervalConfig": {"freq_steps": "every_steps", "freq_epochs": "every_epochs", "freq_secs": "every_seconds"},
        "RolloutConfig": {"max_concurrent_rollouts": "max_concurrent_samples"},
    }

    def adopt(self, document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]] | None:
        """Add what a ``critic`` section implies in AReaL, if the file has one and names no recipe or estimator.

        Raises:
            ConfigError: advantages are normalised in a way that PPO does not have here.
        """
        together = merge_overrides(document.data, overrides)
        actor = together.get("actor")
        if not isinstance(together.get("critic"), dict) or not isinstance(actor, dict):
            return None
        if any(key in together for key in _OWN) or {"recipe", "adv_estimator"} & actor.keys():
            return None
        moved = [each for each in overrides if each.path[:2] in MOVED]
        translation = _Translation(merge_overrides(document.data, moved), Origins(document, list(overrides)))
        translation.add_what_a_critic_implies(actor)
        translated = dataclasses.replace(document, data=translation.data, written=translation.written, notes=translation.notes)
        return translated, [each for each in overrides if each not in moved]


class _Translation:
    """A file that is being translated.

    Args:
        data: the file's keys; changed in place.
        origins: where they are written, for messages.
    """

    def __init__(self, data: dict[str, Any], origins: Origins) -> None:
        self.data, self.origins = data, origins
        self.written: dict[KeyPath, Written] = {}
        self.notes: list[str] = []

    def add_what_a_critic_implies(self, actor: Mapping[str, Any]) -> None:
        """Set the recipe, the place of the KL and the arguments of GAE.

        Args:
            actor: the section with all overrides.
        """
        critic, given = ("critic",), self.data.setdefault("actor", {})
        self._put(critic, ("actor", "recipe"), "ppo")
        if actor.get("kl_ctl", 0) != 0:
            for name, value in (("kl_in", "reward"), ("kl_estimator", "k1")):
                if name not in actor:
                    self._put(("actor", "kl_ctl"), ("actor", name), value)
        norm = given.pop("adv_norm", None)
        self._put(("actor", "adv_norm"), MOVED["actor", "adv_norm"], self._whitens(norm))
        for path in (("actor", "discount"), ("actor", "gae_lambda")):
            if path[1] in given:
                self._put(path, MOVED[path], given.pop(path[1]))
        if self.data["critic"].get("is_critic") is True:
            del self.data["critic"]["is_critic"]
            self.notes.append("critic.is_critic: True (as here)")

    def _whitens(self, norm: Any) -> bool:
        """Return whether advantages are normalised over the tokens of the batch, for an ``adv_norm`` of AReaL."""
        if norm is None:
            return False
        levels = (norm.get("mean_level", "batch"), norm.get("std_level", "batch")) if isinstance(norm, dict) else ()
        if levels == ("batch", "batch") and not norm.get("mean_leave1out"):
            return True
        if levels in ((None, None), ("none", "none")):
            return False
        path = ("actor", "adv_norm")
        raise ConfigError(
            f"{self.origins.of(path)}: {dotted(path)} is {norm!r}; with a critic, advantages are normalised over the tokens of the batch "
            "(mean_level and std_level batch) or not at all (null)."
        )

    def _put(self, source: KeyPath, target: KeyPath, value: Any) -> None:
        node: dict[Any, Any] = self.data
        for part, _ in itertools.pairwise(target):
            node = node.setdefault(part, {})
        node[target[-1]] = value
        self.written[target] = Written(dotted(source), self.origins.of(source))
        self.notes.append(f"{dotted(source)} -> {dotted(target)}: {plain(value)}")
