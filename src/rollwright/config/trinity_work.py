"""A translation of a Trinity-shaped file while it is made: what has been set, said and refused so far."""

from __future__ import annotations

import itertools
from typing import Any

from rollwright.config.source import KeyPath, Origins, Written, dotted
from rollwright.config.trinity_keys import Pairs


class Work:
    """What a translation has so far.

    Args:
        origins: where the file's keys are written, for messages.
    """

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
