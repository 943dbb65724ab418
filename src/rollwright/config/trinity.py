"""Files in Trinity-RFT's shape, translated key by key into the project's own config.

Every key that such a file may hold stands in one of the tables of ``trinity_keys``: what it becomes here, or the one value at which it
asks for what happens here anyway. A key in no table is refused by name: nothing is dropped in silence.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from rollwright.config.generation import ALIASES
from rollwright.config.source import Document, KeyPath, dotted
from rollwright.config.trinity_keys import (
    ALREADY_SO,
    CONVERTED,
    EVAL_TASKSET_DEFAULTS,
    REFUSED,
    RENAMED,
    SELECTORS,
    TASKSET_DEFAULTS,
    TASKSET_RENAMED,
    TOGETHER,
    Pairs,
)
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


def translate(data: dict[str, Any], document: Document) -> Translation:
    """Translate a resolved Trinity-shaped file.

    Args:
        data: its keys, overrides applied and interpolations resolved.
        document: where they were written, for messages.

    Returns:
        The same experiment as a document of the project's own shape; its lines are those of the user's file.

    Raises:
        ConfigError: naming every key that cannot be honoured, with file and line.
    """
    work = Work(document)
    for path, value in _leaves(data):
        work.take(path, value)
    work.finish()
    return Translation(Document(work.data, work.lines, document.file), work.notes)


class Work:
    """A translation that is being made."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.data: dict[str, Any] = {}
        self.lines: dict[KeyPath, int] = {}
        self.notes: list[str] = []
        self.faults: list[str] = []
        self.defaults: dict[str, Any] = {}  # of every taskset
        self.eval_defaults: dict[str, Any] = {}  # of those of evaluation
        self.together: dict[str, tuple[KeyPath, Any]] = {}  # keys of TOGETHER, and what they say
        self.places_of_tasksets: dict[str, KeyPath] = {}  # by the section that they stand in
        self._refused: set[str] = set()

    def take(self, path: KeyPath, value: Any) -> None:
        """Translate one key, or note why it cannot be."""
        key = dotted(path)
        try:
            if section := next((name for name in REFUSED if key == name or key.startswith(f"{name}.")), None):
                if value is None or section in self._refused:
                    return
                self._refused.add(section)
                key = section
                raise ConfigError(REFUSED[section])
            if taskset := _taskset_place(path):
                self._taskset(path, taskset, value)
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
            else:
                known = [*RENAMED, *CONVERTED, *ALREADY_SO, *TOGETHER]
                near = get_close_matches(key, known, n=1)
                raise ConfigError("cannot be honoured here" + (f"; did you mean {near[0]}?" if near else "; remove it"))
        except ConfigError as error:
            self.faults.append(f"{self.place(path)}: {key} {error}")

    def place(self, path: KeyPath) -> str:
        """``file:line`` of a key, or of the nearest key above it that was written."""
        for length in range(len(path), 0, -1):
            if line := self.document.lines.get(path[:length]):
                return f"{self.document.file}:{line}"
        return self.document.file

    def put(self, path: KeyPath, pairs: Pairs) -> None:
        """Set what a key becomes, tell it, and keep the line that it was written in."""
        line = self.document.lines.get(path)
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
            if line is not None:
                self.lines[tuple(parts)] = line
            self.notes.append(f"{dotted(path)} -> {target}: {value}")
        if not pairs:
            self.notes.append(f"{dotted(path)}: nothing to set")

    def _taskset(self, path: KeyPath, place: tuple[str, KeyPath], value: Any) -> None:
        target, inner = place
        key = dotted(inner)
        if target.startswith("tasksets."):
            self.places_of_tasksets.setdefault(str(path[2]), path)
        head = inner[0]
        if value is None:
            return
        if head in ("storage_type",):
            if value != "file":
                raise ConfigError(f"is {value!r}; tasks are read from files, directories and datasets: file")
        elif head in TASKSET_RENAMED:
            if head in ("default_workflow", "default_reward_fn"):
                self.notes.append(f"{dotted(path)}: the name is {TASKSET_RENAMED[head]}; it is read all the same")
            rest = dotted(inner[1:])
            self.put(path, [(f"{target}.{TASKSET_RENAMED[head]}" + (f".{rest}" if rest else ""), value)])
        elif head == "format":
            self.put(path, [(f"{target}.{key}", value)])
        elif head == "rollout_args":
            name = str(inner[1])
            if name == "logprobs":
                self.notes.append(f"{dotted(path)}: log-probabilities are always recorded")
            else:
                self.put(path, [(f"{target}.rollout_args.{ALIASES.get(name, name)}", value)])
        elif head in ("data_selector", "task_selector"):
            if inner[1:] == ("selector_type",):
                chosen = SELECTORS.get(value)
                if chosen is None:
                    raise ConfigError(f"is {value!r}; here there are {', '.join(n for n, c in SELECTORS.items() if c)}")
                self.put(path, [(f"{target}.selector", chosen)])
            else:
                self.put(path, [(f"{target}.selector_args.{inner[-1]}", value)])
        else:
            raise ConfigError("cannot be honoured here; remove it")

    def finish(self) -> None:
        """What several keys decide together; then the faults of all keys at once."""
        decide_together(self)
        if len(self.places_of_tasksets) > 1:
            sections = ", ".join(f"{name} ({self.place(p)})" for name, p in self.places_of_tasksets.items())
            self.faults.append(f"buffer.explorer_input has {sections}, which are places of the same tasks; keep one")
        if self.faults:
            count = f"{len(self.faults)} keys" if len(self.faults) > 1 else "a key"
            raise ConfigError(
                f"{count} of this Trinity-shaped file cannot be taken:\n" + "\n".join(f"  {f}" for f in self.faults)
            )
        mode = self.data.get("mode", "both")
        if not self.data.get("tasksets") and mode in ("both", "explore"):
            raise ConfigError(f"{self.document.file}: no buffer.explorer_input.taskset: there is nothing to explore.")
        self._finish_tasksets()
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

    def _finish_tasksets(self) -> None:
        training = self.data.get("tasksets", [])
        response = self.data.get("gconfig", {}).get("max_new_tokens")
        for index, taskset in enumerate([*training, *self.data.get("eval_tasksets", [])]):
            taskset.setdefault("name", f"taskset{index}")
            for key, value in {**self.defaults, **(self.eval_defaults if index >= len(training) else {})}.items():
                taskset.setdefault(key, value)
            if response is not None:
                taskset.setdefault("rollout_args", {}).setdefault("max_new_tokens", response)
        for taskset in training:
            own = taskset.get("rollout_args", {}).get("n_samples")
            group = self.data.get("gconfig", {}).get("n_samples")
            if own is not None and group is None:
                taskset.setdefault("repeat_times", own)
                self.notes.append(f"tasksets {taskset['name']}: rollout_args.n -> repeat_times: {own}")
            elif own not in (None, group):
                self.notes.append(
                    f"tasksets {taskset['name']}: algorithm.repeat_times ({group}) wins over rollout_args.n ({own})"
                )
        if self.data.get("eval_tasksets") and response is None:
            self.data.setdefault("evaluator", {}).setdefault("gconfig", {"greedy": False})


def _taskset_place(path: KeyPath) -> tuple[str, KeyPath] | None:
    """Where a key of a taskset goes, and the key inside of it; None where the key is not of a taskset."""
    if path[:2] != ("buffer", "explorer_input") or len(path) < 4:
        return None
    if path[2] in ("taskset", "task_set"):
        return "tasksets.0", path[3:]
    if path[2] == "tasksets" and len(path) > 4:
        return f"tasksets.{path[3]}", path[4:]
    if path[2] == "eval_tasksets" and len(path) > 4:
        return f"eval_tasksets.{path[3]}", path[4:]
    return None


def _leaves(value: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    inside = path[-1:] in (("workflow_args",), ("reward_fn_args",), ("stop",), ("auxiliary_models",), ("operators",))
    if isinstance(value, dict) and value and not inside:
        return [leaf for key, child in value.items() for leaf in _leaves(child, (*path, key))]
    if isinstance(value, list) and path[-1:] in (("tasksets",), ("eval_tasksets",)):
        return [leaf for index, child in enumerate(value) for leaf in _leaves(child, (*path, index))]
    return [(path, value)]
