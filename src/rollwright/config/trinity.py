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
    REFUSED,
    RENAMED,
    SELECTORS,
    TASKSET_DEFAULTS,
    TASKSET_RENAMED,
    TOGETHER,
    Pairs,
)
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
    work = _Work(document)
    for path, value in _leaves(data):
        work.take(path, value)
    work.finish()
    return Translation(Document(work.data, work.lines, document.file), work.notes)


class _Work:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.data: dict[str, Any] = {}
        self.lines: dict[KeyPath, int] = {}
        self.notes: list[str] = []
        self.faults: list[str] = []
        self.defaults: dict[str, Any] = {}  # of every taskset
        self.prompt_tokens: int | None = None
        self.train_batch_size: tuple[KeyPath, int] | None = None
        self.sync: dict[str, tuple[KeyPath, int]] = {}  # interval and offset
        self._refused: set[str] = set()

    def take(self, path: KeyPath, value: Any) -> None:
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
            elif key == "model.max_prompt_tokens":
                self.prompt_tokens = int(value)
            elif key == "buffer.train_batch_size":
                self.train_batch_size = (path, int(value))
            elif key in ("synchronizer.sync_interval", "synchronizer.sync_offset"):
                self.sync[str(path[1])] = (path, _whole(value, 1 if key.endswith("interval") else 0))
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
            self.faults.append(f"{document_place(self.document, path)}: {key} {error}")

    def put(self, path: KeyPath, pairs: Pairs) -> None:
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
        self._batch_of_experiences()
        self._synchronisation()
        if self.faults:
            count = f"{len(self.faults)} keys" if len(self.faults) > 1 else "a key"
            raise ConfigError(
                f"{count} of this Trinity-shaped file cannot be taken:\n" + "\n".join(f"  {f}" for f in self.faults)
            )
        mode = self.data.get("mode", "both")
        if not self.data.get("tasksets") and mode in ("both", "explore"):
            raise ConfigError(f"{self.document.file}: no buffer.explorer_input.taskset: there is nothing to explore.")
        self._finish_tasksets()
        self._finish_lengths()
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
            for key, value in self.defaults.items():
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

    def _finish_lengths(self) -> None:
        if self.prompt_tokens is None:
            return
        rollout = self.data.setdefault("rollout", {})
        response = self.data.get("gconfig", {}).get("max_new_tokens")
        if "context_length" in rollout:
            self.notes.append(f"model.max_prompt_tokens: prompts are bounded by the model length {rollout['context_length']}")
        elif response is None:
            raise ConfigError(
                f"{document_place(self.document, ('model', 'max_prompt_tokens'))}: model.max_prompt_tokens bounds a prompt together with "
                "model.max_response_tokens, which is not set; set it, too."
            )
        else:
            rollout["context_length"] = self.prompt_tokens + response
            self.notes.append(
                f"model.max_prompt_tokens + max_response_tokens -> rollout.context_length: {rollout['context_length']}"
            )

    def _batch_of_experiences(self) -> None:
        if self.train_batch_size is None:
            return
        path, size = self.train_batch_size
        group = self.data.get("gconfig", {}).get("n_samples", 1)
        whole = self.data.get("train_dataset", {}).get("batch_size", 1) * group
        if self.data.get("mode", "both") in ("explore", "train"):
            self.put(path, [("store.train_batch_size", size)])
        elif size == whole:
            self.notes.append(f"buffer.train_batch_size: {size} (batch_size × repeat_times, as here)")
        else:
            self.faults.append(
                f"{document_place(self.document, path)}: buffer.train_batch_size is {size}, but in mode both a step trains on what it "
                f"explored: batch_size × repeat_times = {whole}; set it to that, or run mode explore beside mode train"
            )

    def _synchronisation(self) -> None:
        """Weights move every ``interval`` steps, and explorers are ``offset`` batches further ahead."""
        if not self.sync:
            return
        interval = self.sync.get("sync_interval", ((), 1))[1]
        offset = self.sync.get("sync_offset", ((), 0))[1]
        if "sync_interval" in self.sync:
            self.put(self.sync["sync_interval"][0], [("rollout.weight_update_every_steps", interval)])
        path = self.sync["sync_offset" if "sync_offset" in self.sync else "sync_interval"][0]
        self.put(path, [("rollout.max_head_offpolicyness", interval - 1 + offset)])
        self.notes.append(
            f"synchronizer: weights move after every {interval} steps of the trainer, and no token is trained that is more than "
            f"sync_interval - 1 + sync_offset = {interval - 1 + offset} steps old; explorers wait where they would be further ahead"
        )


def _whole(value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"is {value!r}; it is a whole number of at least {least}")
    return value


def document_place(document: Document, path: KeyPath) -> str:
    """``file:line`` of a key, or of the nearest key above it that was written."""
    for length in range(len(path), 0, -1):
        if line := document.lines.get(path[:length]):
            return f"{document.file}:{line}"
    return document.file


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
