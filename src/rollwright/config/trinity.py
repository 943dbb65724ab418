"""Files in Trinity-RFT's shape, translated key by key into the project's own config.

Every key that such a file may hold stands in one of the tables of ``trinity_keys``: what it becomes here, or the one value at which it
asks for what happens here anyway. A key in no table is refused by name: nothing is dropped in silence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollwright.config.source import Document, KeyPath, Origins, Override, Written, dotted
from rollwright.config.trinity_keys import (
    ALREADY_SO,
    CONVERTED,
    EVAL_TASKSET_DEFAULTS,
    KNOWN,
    REFUSED,
    RENAMED,
    TASKSET_DEFAULTS,
    TOGETHER,
    Pairs,
    hint,
)
from rollwright.config.trinity_tasksets import finish_tasksets, take_taskset_key
from rollwright.config.trinity_together import decide_together
from rollwright.errors import ConfigError


@dataclass
class Translation:
    """The project's config, and a line on each key for the user to read."""

    document: Document
    notes: list[str] = field(default_factory=list)


def is_trinity_shaped(data: dict[str, Any]) -> bool:
    """True where the top level has sections that only Trinity-RFT's files have."""
    return bool({"buffer", "algorithm", "explorer", "synchronizer"} & set(data)) or "model_path" in (data.get("model") or {})


def translate(data: dict[str, Any], document: Document, overrides: Sequence[Override] = ()) -> Translation:
    """Translate a resolved Trinity-shaped file.

    Args:
        data: its keys, overrides applied and interpolations resolved.
        document: where they were written, for messages.
        overrides: those that were applied, for messages.

    Returns:
        The same experiment as a document of the project's own shape, which knows how each key was written.

    Raises:
        ConfigError: naming every key that cannot be honoured, with file and line.
    """
    work = Work(Origins(document, list(overrides)))
    for path, value in _leaves(data):
        work.take(path, value)
    work.finish()
    return Translation(Document(work.data, file=document.file, written=work.written), work.notes)


class Work:
    """A translation that is being made."""

    def __init__(self, origins: Origins) -> None:
        self.origins = origins
        self.data: dict[str, Any] = {}
        self.written: dict[KeyPath, Written] = {}
        self.notes: list[str] = []
        self.faults: list[str] = []
        self.defaults: dict[str, Any] = {}  # of every taskset
        self.eval_defaults: dict[str, Any] = {}  # of those of evaluation
        self.together: dict[str, tuple[KeyPath, Any]] = {}  # keys of TOGETHER, and what they say
        self.places_of_tasksets: dict[str, KeyPath] = {}  # by the section that they stand in
        self._refused: set[KeyPath] = set()

    def take(self, path: KeyPath, value: Any) -> None:
        """Translate one key, or note why it cannot be."""
        key = dotted(path)
        try:
            if value in ({}, []):
                value = None  # an empty section says as little as null
            if section := next((name for name in REFUSED if key == name or key.startswith(f"{name}.")), None):
                if value is not None:
                    self.once(path[: section.count(".") + 1], REFUSED[section])
            elif take_taskset_key(self, path, value):
                pass
            elif value is None:
                self.notes.append(f"{key}: not set")
            elif key in TASKSET_DEFAULTS:
                self.defaults[TASKSET_DEFAULTS[key]] = value
                self.notes.append(f"{key}: {value}, for tasksets that name none")
            elif key in EVAL_TASKSET_DEFAULTS:
                self.eval_defaults[EVAL_TASKSET_DEFAULTS[key]] = value
                self.notes.append(f"{key}: {value}, for evaluation tasksets that name none")
            elif key in TOGETHER:
                self.together[key] = (path, value)
            elif key in RENAMED:
                self.put(path, [(RENAMED[key], value)])
            elif key in CONVERTED:
                self.put(path, CONVERTED[key](value))
            elif key in ALREADY_SO:
                if Any not in ALREADY_SO[key] and value not in ALREADY_SO[key]:
                    raise ConfigError(f"is {value!r}; here it can only be {' or '.join(map(str, ALREADY_SO[key]))}")
                self.notes.append(f"{key}: {value} (as here)")
            elif any(name.startswith(f"{key}.") for name in KNOWN):
                raise ConfigError(f"is a section of keys, not {value!r}")
            else:
                raise ConfigError(f"cannot be honoured here{hint(path, [tuple(name.split('.')) for name in KNOWN])}")
        except ConfigError as error:
            self.faults.append(f"{self.origins.of(path)}: {key} {error}")

    def once(self, path: KeyPath, fault: str) -> None:
        """Note a fault of a whole section, however many keys it has."""
        if path not in self._refused:
            self._refused.add(path)
            self.faults.append(f"{self.origins.of(path)}: {dotted(path)} {fault}")

    def put(self, path: KeyPath, pairs: Pairs) -> None:
        """Set what a key becomes, tell it, and remember how it was written."""
        for target, value in pairs:
            parts: list[Any] = [int(part) if part.isdigit() else part for part in target.split(".")]
            node: Any = self.data
            for part, following in itertools.pairwise(parts):
                if isinstance(node, list):
                    while len(node) <= part:
                        node.append({})
                    node = node[part]
                else:
                    node = node.setdefault(part, [] if isinstance(following, int) else {})
            node[parts[-1]] = value
            self.written[tuple(parts)] = Written(dotted(path), self.origins.of(path))
            self.notes.append(f"{dotted(path)} -> {target}: {value}")
        if not pairs:
            self.notes.append(f"{dotted(path)}: nothing to set")

    def finish(self) -> None:
        """What several keys decide together; then the faults of all keys at once."""
        decide_together(self)
        if len(self.places_of_tasksets) > 1:
            sections = ", ".join(f"{name} ({self.origins.of(p)})" for name, p in self.places_of_tasksets.items())
            self.faults.append(f"buffer.explorer_input has {sections}, which are places of the same tasks; keep one")
        if self.faults:
            count = f"{len(self.faults)} keys" if len(self.faults) > 1 else "a key"
            raise ConfigError(
                f"{count} of this Trinity-shaped file cannot be taken:\n" + "\n".join(f"  {f}" for f in self.faults)
            )
        mode = self.data.get("mode", "both")
        if not self.data.get("tasksets") and mode in ("both", "explore"):
            raise ConfigError(f"{self.origins.document.file}: no buffer.explorer_input.taskset: there is nothing to explore.")
        finish_tasksets(self)
        self.data.setdefault("experiment_name", "trinity")
        self.data.setdefault("trial_name", "trial")
        if mode in ("explore", "train", "serve"):
            self.data.setdefault("store", {})
        elif mode == "both":
            for key in ("url", "type"):
                if (value := self.data.get("store", {}).pop(key, None)) is not None:
                    self.notes.append(f"store.{key}: {value} is not needed: mode both keeps experiences in memory")
            if not self.data.get("store", True):
                del self.data["store"]


def _leaves(value: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    inside = path[-1:] in (("workflow_args",), ("reward_fn_args",), ("stop",), ("auxiliary_models",), ("operators",))
    if isinstance(value, dict) and value and not inside:
        return [leaf for key, child in value.items() for leaf in _leaves(child, (*path, key))]
    if isinstance(value, list) and path[-1:] in (("tasksets",), ("eval_tasksets",)):
        return [leaf for index, child in enumerate(value) for leaf in _leaves(child, (*path, index))]
    return [(path, value)]
