"""Accepts AReaL's key names, and translates Trinity-RFT's config files key by key.

The tables in ``trinity_keys`` list every supported key of a Trinity-RFT file. Each key either maps to keys here, or is accepted only at
values that match the fixed behaviour here. Any other key is rejected with an error that names it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

from rollwright.compat.trinity_keys import (
    ALREADY_SO,
    CONVERTED,
    FORMAT_REFUSED,
    KNOWN,
    REFUSED,
    RENAMED,
    SELECTORS,
    TASKSET_DEFAULTS,
    TASKSET_RENAMED,
    TOGETHER,
    choice,
    hint,
)
from rollwright.config.generation import ALIASES
from rollwright.config.source import ConfigDialect, Document, KeyPath, Origins, Written, dotted, plain, undotted
from rollwright.errors import ConfigError

INPUT = ("buffer", "explorer_input")
#: Keys of ``INPUT`` that hold tasksets, and whether each holds a list of them.
_PLACES = {"taskset": False, "task_set": False, "tasksets": True, "eval_tasksets": True}
#: Sections of a Trinity-RFT taskset, and the section that their keys belong to here.
_SECTIONS = {
    "format": "format",
    "rollout_args": "gconfig",
    "data_selector": "selector_args",
    "task_selector": "selector_args",
}
_REPLAY = "buffer.trainer_input.experience_buffer.replay_buffer."
#: Trinity-RFT's default of ``kl_coef`` if a file names a ``kl_loss_fn``.
KL_COEFFICIENT = 0.001


class AReaL(ConfigDialect):
    """AReaL's keys. Its files have the same structure as this project's, so only names differ."""

    system: ClassVar[str] = "AReaL"
    #: Only names whose meaning is the same.
    renamed: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "IntervalConfig": {"freq_steps": "every_steps", "freq_epochs": "every_epochs", "freq_secs": "every_seconds"},
        "RolloutConfig": {"max_concurrent_rollouts": "max_concurrent_samples"},
    }


class Trinity(ConfigDialect):
    """Trinity-RFT's files, and the names that its sections have."""

    system: ClassVar[str] = "Trinity-RFT"
    second_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "TasksetConfig": {
            "default_workflow_type": "workflow",
            "default_reward_fn_type": "reward_fn",
            "workflow_kwargs": "workflow_args",
            "rollout_args": "gconfig",
            "repeat_times": "group_size",
            "subset_name": "subset",
        }
    }

    def recognises(self, data: dict[str, Any]) -> bool:
        """Return True if the top level has sections of Trinity-RFT's files."""
        return bool({"buffer", "algorithm", "explorer", "synchronizer"} & set(data)) or "model_path" in (
            data.get("model") or {}
        )

    def translate(self, data: dict[str, Any], origins: Origins) -> Document:
        """Translate a resolved file; see ``ConfigDialect.translate``."""
        work = Work(origins)
        for path, value in _leaves(data):
            _take(work, path, value)
        _finish(work)
        return Document(work.data, file=origins.document.file, written=work.written, notes=work.notes)


class Work:
    """State of a translation.

    Args:
        origins: where the file's keys are written, for messages.
    """

    def __init__(self, origins: Origins) -> None:
        self.origins = origins
        self.data: dict[str, Any] = {}
        self.written: dict[KeyPath, Written] = {}
        self.notes: list[str] = []
        self.faults: list[str] = []
        self.defaults: dict[str, dict[str, Any]] = {"": {}, "evaluation ": {}}  # of all tasksets; of evaluation tasksets
        self.together: dict[str, Any] = {}  # values of the keys in TOGETHER
        self.places_of_tasksets: dict[str, str] = {}  # by their section

    def place(self, key: str) -> str:
        """Return where a key is written."""
        return self.origins.of(undotted(key))

    def fault(self, key: str, message: str) -> ConfigError:
        """Return the error about a key, with its location."""
        return ConfigError(f"{self.place(key)}: {key} {message}")

    def put(self, key: str, *pairs: tuple[str, Any]) -> None:
        """Set the keys that a foreign key translates to, add a note for the user, and record how the key was written."""
        for target, value in pairs:
            parts: Any = undotted(target)
            node: Any = self.data
            for part, following in itertools.pairwise(parts):
                if isinstance(node, list):
                    node.extend({} for _ in range(len(node), part + 1))
                    node = node[part]
                else:
                    node = node.setdefault(part, [] if isinstance(following, int) else {})
            node[parts[-1]] = value
            self.written[parts] = Written(key, self.place(key))
            self.notes.append(f"{key} -> {target}: {plain(value)}")
        if not pairs:
            self.notes.append(f"{key}: nothing to set")


def _take(work: Work, path: KeyPath, value: Any) -> None:
    """Translate one key, or record why that is impossible."""
    key = dotted(path)
    try:
        if value in ({}, []):
            value = None  # an empty section counts as null
        if section := next((name for name in REFUSED if key == name or key.startswith(f"{name}.")), None):
            if value is not None:
                work.faults.append(str(work.fault(section, REFUSED[section])))
        elif path[:2] == INPUT and path[2:] and path[2] in _PLACES:
            _take_taskset_key(work, path, value)
        elif value is None:
            work.notes.append(f"{key}: not set")
        elif key in TASKSET_DEFAULTS:
            kind, name = TASKSET_DEFAULTS[key]
            work.defaults[kind][name] = value
            work.notes.append(f"{key}: {value}, for {kind}tasksets that name none")
        elif key in TOGETHER:
            work.together[key] = value
        elif key in RENAMED:
            work.put(key, (RENAMED[key], value))
        elif key in CONVERTED:
            work.put(key, *CONVERTED[key](value))
        elif key in ALREADY_SO:
            if Any not in ALREADY_SO[key] and value not in ALREADY_SO[key]:
                raise ConfigError(f"is {value!r}; here it can only be {' or '.join(map(str, ALREADY_SO[key]))}")
            work.notes.append(f"{key}: {value} (as here)")
        elif any(name.startswith(f"{key}.") for name in KNOWN):
            raise ConfigError(f"is a section of keys, not {value!r}")
        else:
            raise ConfigError(f"cannot be honoured here{hint(path, [tuple(name.split('.')) for name in KNOWN])}")
    except ConfigError as error:
        work.faults.append(str(work.fault(key, str(error))))


def _finish(work: Work) -> None:
    """Translate keys that depend on each other; then raise the faults of all keys at once."""
    for decide in (_name, _kl, _entropy, _replay, _batch_of_experiences, _synchronisation, _lengths, _stragglers):
        try:
            decide(work)
        except ConfigError as error:
            work.faults.append(str(error))
    if len(work.places_of_tasksets) > 1:
        sections = ", ".join(f"{name} ({place})" for name, place in work.places_of_tasksets.items())
        work.faults.append(f"buffer.explorer_input has {sections}, which are places of the same tasks; keep one")
    if faults := list(dict.fromkeys(work.faults)):
        count = f"{len(faults)} keys" if len(faults) > 1 else "a key"
        raise ConfigError("\n  ".join([f"{count} of this Trinity-shaped file cannot be taken:", *faults]))
    mode = work.data.get("mode", "both")
    if not work.data.get("tasksets") and mode in ("both", "explore"):
        raise ConfigError(f"{work.origins.document.file}: no buffer.explorer_input.taskset: there is nothing to explore.")
    _finish_tasksets(work)
    work.data.setdefault("experiment_name", "trinity")
    work.data.setdefault("trial_name", "trial")
    if mode in ("explore", "train", "serve"):
        work.data.setdefault("store", {})
    elif mode == "both":
        for key in ("url", "type"):
            if (value := work.data.get("store", {}).pop(key, None)) is not None:
                work.notes.append(f"store.{key}: {value} is not needed: mode both keeps experiences in memory")
        if not work.data.get("store", True):
            del work.data["store"]


def _leaves(value: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    inside = path[-1:] in (("workflow_args",), ("reward_fn_args",), ("stop",), ("auxiliary_models",), ("operators",))
    if isinstance(value, dict) and value and not inside:
        return [leaf for key, child in value.items() for leaf in _leaves(child, (*path, key))]
    if isinstance(value, list) and path[-1:] in (("tasksets",), ("eval_tasksets",)):
        return [leaf for index, child in enumerate(value) for leaf in _leaves(child, (*path, index))]
    return [(path, value)]


# --- tasksets ----------------------------------------------------------------------------------------------------


def _take_taskset_key(work: Work, path: KeyPath, value: Any) -> None:
    """Translate one key of a taskset, below ``buffer.explorer_input``.

    Raises:
        ConfigError: the key is not supported, or its value has the wrong type.
    """
    section, several = str(path[2]), _PLACES[str(path[2])]
    if several and (len(path) == 3 or not isinstance(path[3], int)):
        work.faults.append(str(work.fault(dotted(path[:3]), "is a list of tasksets: begin each with a dash")))
        return
    if section != "eval_tasksets":
        work.places_of_tasksets.setdefault(section, work.origins.of(path))
    inner = path[4:] if several else path[3:]
    if inner and value is not None:
        _take_inside(work, path, f"{section}.{path[3]}." if several else "tasksets.0.", inner, value)
    elif isinstance(value, list):
        raise ConfigError(f"is one taskset; a list stands under {dotted((*INPUT, 'tasksets'))}")
    elif value is not None:
        raise ConfigError(f"is a taskset, a section of keys, not {value!r}")


def _take_inside(work: Work, path: KeyPath, target: str, inner: KeyPath, value: Any) -> None:
    """Translate a key of the taskset that becomes ``target``."""
    key, head, rest = dotted(path), str(inner[0]), dotted(inner[1:])
    if head in _SECTIONS and not rest:
        raise ConfigError(f"is a section of keys, not {value!r}")
    if head == "storage_type":
        if value != "file":
            raise ConfigError(f"is {value!r}; tasks are read from files, directories and datasets: file")
    elif head in TASKSET_RENAMED:
        if head in ("default_workflow", "default_reward_fn"):
            work.notes.append(f"{key}: the name is {head}_type; it is read all the same")
        work.put(key, (f"{target}{dotted((TASKSET_RENAMED[head], *inner[1:]))}", value))
    elif head == "format" and rest in FORMAT_REFUSED:
        if value is not False:
            raise ConfigError(FORMAT_REFUSED[rest])
        work.notes.append(f"{key}: {value} (as here)")
    elif inner == ("rollout_args", "logprobs"):
        work.notes.append(f"{key}: log-probabilities are always recorded")
    elif inner in (("data_selector", "selector_type"), ("task_selector", "selector_type")):
        work.put(key, (f"{target}selector", SELECTORS[choice(value, *SELECTORS)]))
    elif head in _SECTIONS:
        name = ALIASES.get(rest, rest) if head == "rollout_args" else rest
        work.put(key, (f"{target}{_SECTIONS[head]}.{name}", value))
    else:
        raise ConfigError(f"cannot be honoured here{hint(path, [(*path[: -len(inner)], name) for name in TASKSET_RENAMED])}")


def _finish_tasksets(work: Work) -> None:
    """Fill in the tasksets' defaults, response length and group size."""
    training, evaluation = work.data.get("tasksets", []), work.data.get("eval_tasksets", [])
    response, group = (work.data.get("gconfig", {}).get(key) for key in ("max_new_tokens", "n_samples"))
    for index, taskset in enumerate([*training, *evaluation]):
        taskset.setdefault("name", f"taskset{index}")
        for key, value in {**work.defaults[""], **(work.defaults["evaluation "] if index >= len(training) else {})}.items():
            taskset.setdefault(key, value)
        if response is not None:
            taskset.setdefault("gconfig", {}).setdefault("max_new_tokens", response)
    own_lengths = [taskset.get("gconfig", {}).get("max_new_tokens") for taskset in training]
    if response is not None and own_lengths and response not in own_lengths:
        work.data["gconfig"]["max_new_tokens"] = own_lengths[0]
        work.notes.append(
            f"model.max_response_tokens: {response} is of no taskset that is trained on, as all have a rollout_args.max_tokens, which wins"
        )
    for taskset in training:
        own = taskset.get("gconfig", {}).get("n_samples")
        if own is not None and group is None:
            taskset.setdefault("group_size", own)
            work.notes.append(f"tasksets {taskset['name']}: rollout_args.n -> group_size: {own}")
        elif own not in (None, group):
            work.notes.append(f"tasksets {taskset['name']}: algorithm.repeat_times ({group}) wins over rollout_args.n ({own})")
    if evaluation and response is None:
        work.data.setdefault("evaluator", {}).setdefault("gconfig", {"greedy": False})
    elif not evaluation and work.data.pop("evaluator", None):
        work.notes.append("explorer: there are no eval_tasksets, so nothing is evaluated, at whatever interval")


# --- keys that are translated together ---------------------------------------------------------------------------


def _name(work: Work) -> None:
    """Add the group of runs, which is a directory in Trinity-RFT, to the name of the trial."""
    group, name = work.together.get("group"), work.together.get("name", "trial")
    if group:
        work.put("group", ("trial_name", f"{group}-{name}"))
    elif "name" in work.together:
        work.put("name", ("trial_name", name))


def _stragglers(work: Work) -> None:
    """Translate the keys about samples that take longer than the others."""
    ratio, wait = "explorer.over_rollout.ratio", "explorer.over_rollout.wait_after_min"
    dynamic = "explorer.dynamic_timeout.enable"
    if ratio in work.together:
        work.put(ratio, ("rollout.over_sampling", work.together[ratio]))
    if work.together.get(ratio) and work.together.get(wait):
        raise work.fault(
            wait, "is a time to wait for stragglers, but they are cut as soon as the batch is complete; set it to 0"
        )
    if work.together.get(dynamic):
        raise work.fault(
            dynamic,
            "goes by how long samples usually take, but nobody measures a sample's usual time; set it to false, and explorer.max_timeout",
        )
    for key in (wait, dynamic, "explorer.dynamic_timeout.ratio"):
        if key in work.together:
            work.notes.append(f"{key}: {work.together[key]} is of nothing that is switched on")


def _kl(work: Work) -> None:
    name_key, weight_key = "algorithm.kl_loss_fn", "algorithm.kl_loss_fn_args.kl_coef"
    name, weight = work.together.get(name_key), work.together.get(weight_key)
    if name not in (None, "none", "k1", "k2", "k3"):
        raise work.fault(name_key, f"is {name!r}; here there are k1, k2, k3 and none")
    if name == "none":
        work.put(name_key, ("actor.kl_ctl", 0.0))
        if weight is not None:
            work.notes.append(f"{weight_key}: {weight} is the weight of no KL, as kl_loss_fn is none")
        return
    if name is not None:
        estimator = [("actor.kl_estimator", name)] if weight != 0 else []  # no estimator if the weight is 0
        work.put(name_key, *estimator, *([("actor.kl_ctl", KL_COEFFICIENT)] if weight is None else []))
    if weight is not None:
        work.put(weight_key, ("actor.kl_ctl", weight))


def _entropy(work: Work) -> None:
    name_key, weight_key = "algorithm.entropy_loss_fn", "algorithm.entropy_loss_fn_args.entropy_coef"
    name, weight = work.together.get(name_key, "default"), work.together.get(weight_key)
    if name not in ("default", "none"):
        raise work.fault(name_key, f"is {name!r}; here there are default and none")
    if name_key in work.together:
        work.notes.append(f"{name_key}: {name} (as here)")
    if weight is not None and name == "none":
        work.notes.append(f"{weight_key}: {weight} is the weight of nothing, as entropy_loss_fn is none")
    elif weight is not None:
        work.put(weight_key, ("actor.entropy_coef", weight))


def _replay(work: Work) -> None:
    given = {key.removeprefix(_REPLAY): value for key, value in work.together.items() if key.startswith(_REPLAY)}
    if not given:
        return
    if not given.pop("enable", False):
        work.notes.append(f"{_REPLAY[:-1]}: not enabled, so each experience is used once, in order")
        return
    work.put(f"{_REPLAY}enable", ("store.order", "priority"))
    cooldown = given.pop("reuse_cooldown_time", None)
    if cooldown is None:
        work.notes.append(f"{_REPLAY}reuse_cooldown_time: not set, so each experience is used once")
    else:
        work.put(f"{_REPLAY}reuse_cooldown_time", ("store.cooldown_seconds", cooldown), ("store.uses", None))
    for key, value in given.items():
        work.put(f"{_REPLAY}{key}", (f"store.{key}", value))
    if work.data["store"].get("type") == "queue":
        work.data["store"]["type"] = "sql"
        work.notes.append("store.type: sql, a queue with priorities is a database")


def _batch_of_experiences(work: Work) -> None:
    key = "buffer.train_batch_size"
    if key not in work.together:
        return
    size = _whole(work, key, 1)
    whole = work.data.get("train_dataset", {}).get("batch_size", 1) * work.data.get("gconfig", {}).get("n_samples", 1)
    if work.data.get("mode", "both") in ("explore", "train"):
        work.put(key, ("store.train_batch_size", size))
    elif size == whole:
        work.notes.append(f"{key}: {size} (batch_size × repeat_times, as here)")
    else:
        raise work.fault(
            key,
            f"is {size}, but in mode both a step trains on what it explored: batch_size × repeat_times = {whole}; set it to that, or "
            "run mode explore beside mode train",
        )


def _synchronisation(work: Work) -> None:
    """Translate the synchronisation of weights every ``interval`` steps, with explorers ``offset`` batches further ahead."""
    interval_key, offset_key = "synchronizer.sync_interval", "synchronizer.sync_offset"
    if not {interval_key, offset_key} & work.together.keys():
        return
    interval, offset = _whole(work, interval_key, 1, otherwise=1), _whole(work, offset_key, 0)
    if interval_key in work.together:
        work.put(interval_key, ("rollout.weight_update_every_steps", interval))
    newest = offset_key if offset_key in work.together else interval_key
    work.put(newest, ("rollout.max_head_offpolicyness", interval - 1 + offset))
    work.notes.append(
        f"synchronizer: weights move after every {interval} steps of the trainer, and no token is trained that is more than "
        f"sync_interval - 1 + sync_offset = {interval - 1 + offset} steps old; explorers wait where they would be further ahead"
    )


def _whole(work: Work, key: str, least: int, otherwise: int = 0) -> int:
    value = work.together.get(key, otherwise)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise work.fault(key, f"is {value!r}; it is a whole number of at least {least}")
    return value


def _lengths(work: Work) -> None:
    key = "model.max_prompt_tokens"
    if key not in work.together:
        return
    rollout = work.data.setdefault("rollout", {})
    response = work.data.get("gconfig", {}).get("max_new_tokens")
    if "context_length" in rollout:
        work.notes.append(f"{key}: prompts are bounded by the model length {rollout['context_length']}")
    elif response is None:
        raise work.fault(key, "bounds a prompt together with model.max_response_tokens, which is not set; set it, too")
    else:
        rollout["context_length"] = _whole(work, key, 1) + response
        work.notes.append(f"{key} + max_response_tokens -> rollout.context_length: {rollout['context_length']}")


#: Systems whose config files and key names are understood.
DIALECTS: tuple[type[ConfigDialect], ...] = (AReaL, Trinity)
