"""Files in Trinity-RFT's shape, translated key by key into the project's own config.

Every key that such a file may hold is in one of the tables of ``trinity_keys``: what it becomes here, or the one value at which
it asks for what happens here anyway. A key in no table is refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rollwright.compat.trinity_keys import (
    ALREADY_SO,
    CONVERTED,
    EVAL_TASKSET_DEFAULTS,
    FORMAT_REFUSED,
    KNOWN,
    REFUSED,
    RENAMED,
    SELECTORS,
    TASKSET_DEFAULTS,
    TASKSET_RENAMED,
    TOGETHER,
    Pairs,
    choice,
    hint,
)
from rollwright.config.generation import ALIASES
from rollwright.config.source import Dialect, Document, KeyPath, Origins, Override, Translation, Written, dotted
from rollwright.errors import ConfigError

INPUT = ("buffer", "explorer_input")
#: Keys of a taskset that hold keys themselves.
_SECTIONS = ("format", "rollout_args", "data_selector", "task_selector")
_REPLAY = "buffer.trainer_input.experience_buffer.replay_buffer."
#: The weight of the KL that Trinity-RFT takes where a file names a ``kl_loss_fn`` and no ``kl_coef``.
KL_COEFFICIENT = 0.001


class Trinity(Dialect):
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
        """True where the top level has sections that only Trinity-RFT's files have."""
        return bool({"buffer", "algorithm", "explorer", "synchronizer"} & set(data)) or "model_path" in (
            data.get("model") or {}
        )

    def translate(self, data: dict[str, Any], document: Document, overrides: Sequence[Override] = ()) -> Translation:
        """Translate a resolved file; see ``Dialect.translate``."""
        work = Work(Origins(document, list(overrides)))
        for path, value in _leaves(data):
            _take(work, path, value)
        _finish(work)
        return Translation(Document(work.data, file=document.file, written=work.written), work.notes)


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


def _take(work: Work, path: KeyPath, value: Any) -> None:
    """Translate one key, or note why it cannot be."""
    key = dotted(path)
    try:
        if value in ({}, []):
            value = None  # an empty section says as little as null
        if section := next((name for name in REFUSED if key == name or key.startswith(f"{name}.")), None):
            if value is not None:
                work.once(path[: section.count(".") + 1], REFUSED[section])
        elif _take_taskset_key(work, path, value):
            pass
        elif value is None:
            work.notes.append(f"{key}: not set")
        elif key in TASKSET_DEFAULTS:
            work.defaults[TASKSET_DEFAULTS[key]] = value
            work.notes.append(f"{key}: {value}, for tasksets that name none")
        elif key in EVAL_TASKSET_DEFAULTS:
            work.eval_defaults[EVAL_TASKSET_DEFAULTS[key]] = value
            work.notes.append(f"{key}: {value}, for evaluation tasksets that name none")
        elif key in TOGETHER:
            work.together[key] = (path, value)
        elif key in RENAMED:
            work.put(path, [(RENAMED[key], value)])
        elif key in CONVERTED:
            work.put(path, CONVERTED[key](value))
        elif key in ALREADY_SO:
            if Any not in ALREADY_SO[key] and value not in ALREADY_SO[key]:
                raise ConfigError(f"is {value!r}; here it can only be {' or '.join(map(str, ALREADY_SO[key]))}")
            work.notes.append(f"{key}: {value} (as here)")
        elif any(name.startswith(f"{key}.") for name in KNOWN):
            raise ConfigError(f"is a section of keys, not {value!r}")
        else:
            raise ConfigError(f"cannot be honoured here{hint(path, [tuple(name.split('.')) for name in KNOWN])}")
    except ConfigError as error:
        work.faults.append(f"{work.origins.of(path)}: {key} {error}")


def _finish(work: Work) -> None:
    """What several keys decide together; then the faults of all keys at once."""
    _decide_together(work)
    if len(work.places_of_tasksets) > 1:
        sections = ", ".join(f"{name} ({work.origins.of(p)})" for name, p in work.places_of_tasksets.items())
        work.faults.append(f"buffer.explorer_input has {sections}, which are places of the same tasks; keep one")
    if work.faults:
        count = f"{len(work.faults)} keys" if len(work.faults) > 1 else "a key"
        raise ConfigError(f"{count} of this Trinity-shaped file cannot be taken:\n" + "\n".join(f"  {f}" for f in work.faults))
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


def _take_taskset_key(work: Work, path: KeyPath, value: Any) -> bool:
    """Translate one key below ``buffer.explorer_input``; False where it is no taskset's.

    Raises:
        ConfigError: it cannot be honoured, or has another shape.
    """
    if path[:2] != INPUT or len(path) < 3 or path[2] not in ("taskset", "task_set", "tasksets", "eval_tasksets"):
        return False
    section, several = str(path[2]), path[2] in ("tasksets", "eval_tasksets")
    if several and (len(path) == 3 or not isinstance(path[3], int)):
        work.once(path[:3], "is a list of tasksets: begin each with a dash")
        return True
    place = f"{section}.{path[3]}" if several else "tasksets.0"
    inner = path[4:] if several else path[3:]
    if section != "eval_tasksets":
        work.places_of_tasksets.setdefault(section, path)
    if value is None:
        return True
    if not inner:
        if isinstance(value, list):
            raise ConfigError(f"is one taskset; a list stands under {dotted((*INPUT, 'tasksets'))}")
        raise ConfigError(f"is a taskset, a section of keys, not {value!r}")
    _take_inside(work, path, f"{place}.", inner, value)
    return True


def _take_inside(work: Work, path: KeyPath, target: str, inner: KeyPath, value: Any) -> None:
    """Translate a key inside of a taskset, whose place here is ``target``."""
    head, rest = str(inner[0]), dotted(inner[1:])
    if head in _SECTIONS and not rest:
        raise ConfigError(f"is a section of keys, not {value!r}")
    if head == "storage_type":
        if value != "file":
            raise ConfigError(f"is {value!r}; tasks are read from files, directories and datasets: file")
    elif head in TASKSET_RENAMED:
        name = TASKSET_RENAMED[head]
        if head in ("default_workflow", "default_reward_fn"):
            work.notes.append(f"{dotted(path)}: the name is {head}_type; it is read all the same")
        work.put(path, [(f"{target}{name}" + (f".{rest}" if rest else ""), value)])
    elif head == "format":
        if rest in FORMAT_REFUSED and value is not False:
            raise ConfigError(FORMAT_REFUSED[rest])
        if rest in FORMAT_REFUSED:
            work.notes.append(f"{dotted(path)}: {value} (as here)")
        else:
            work.put(path, [(f"{target}format.{rest}", value)])
    elif head == "rollout_args":
        if rest == "logprobs":
            work.notes.append(f"{dotted(path)}: log-probabilities are always recorded")
        else:
            work.put(path, [(f"{target}gconfig.{ALIASES.get(rest, rest)}", value)])
    elif rest == "selector_type":
        work.put(path, [(f"{target}selector", SELECTORS[choice(value, *SELECTORS)])])
    elif head in ("data_selector", "task_selector"):
        work.put(path, [(f"{target}selector_args.{rest}", value)])
    else:
        raise ConfigError(f"cannot be honoured here{hint(path, [(*path[: -len(inner)], name) for name in TASKSET_RENAMED])}")


def _finish_tasksets(work: Work) -> None:
    """Give tasksets the defaults of their section, the response's length, and the group that ``n`` means."""
    training = work.data.get("tasksets", [])
    response = work.data.get("gconfig", {}).get("max_new_tokens")
    for index, taskset in enumerate([*training, *work.data.get("eval_tasksets", [])]):
        taskset.setdefault("name", f"taskset{index}")
        for key, value in {**work.defaults, **(work.eval_defaults if index >= len(training) else {})}.items():
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
        group = work.data.get("gconfig", {}).get("n_samples")
        if own is not None and group is None:
            taskset.setdefault("group_size", own)
            work.notes.append(f"tasksets {taskset['name']}: rollout_args.n -> group_size: {own}")
        elif own not in (None, group):
            work.notes.append(f"tasksets {taskset['name']}: algorithm.repeat_times ({group}) wins over rollout_args.n ({own})")
    _finish_evaluation(work, response)


def _finish_evaluation(work: Work, response: int | None) -> None:
    if work.data.get("eval_tasksets"):
        if response is None:
            work.data.setdefault("evaluator", {}).setdefault("gconfig", {"greedy": False})
    elif work.data.pop("evaluator", None):
        work.notes.append("explorer: there are no eval_tasksets, so nothing is evaluated, at whatever interval")


# --- keys that decide something together -------------------------------------------------------------------------


def _decide_together(work: Work) -> None:
    """Translate the keys of ``TOGETHER`` that a file has; faults are noted."""
    for decide in (_name, _kl, _entropy, _replay, _batch_of_experiences, _synchronisation, _lengths, _stragglers):
        try:
            decide(work)
        except ConfigError as error:
            work.faults.append(str(error))


def _said(work: Work, key: str, otherwise: Any = None) -> Any:
    return work.together[key][1] if key in work.together else otherwise


def _fault(work: Work, key: str, message: str) -> ConfigError:
    return ConfigError(f"{work.origins.of(work.together[key][0])}: {key} {message}")


def _path(work: Work, *keys: str) -> KeyPath:
    """Where the first of the keys that the file has is written."""
    return next(work.together[key][0] for key in keys if key in work.together)


def _name(work: Work) -> None:
    """A group of runs is a directory there, between the project's and the run's; here it is a part of the run's name."""
    group, name = _said(work, "group"), _said(work, "name", "trial")
    if group:
        work.put(_path(work, "group"), [("trial_name", f"{group}-{name}")])
    elif "name" in work.together:
        work.put(_path(work, "name"), [("trial_name", name)])


def _stragglers(work: Work) -> None:
    """Samples that take longer than the others."""
    ratio_key, wait_key = "explorer.over_rollout.ratio", "explorer.over_rollout.wait_after_min"
    if ratio_key in work.together:
        work.put(_path(work, ratio_key), [("rollout.over_sampling", _said(work, ratio_key))])
    if _said(work, ratio_key) and _said(work, wait_key):
        raise _fault(
            work, wait_key, "is a time to wait for stragglers, but they are cut as soon as the batch is complete; set it to 0"
        )
    if _said(work, "explorer.dynamic_timeout.enable"):
        raise _fault(
            work,
            "explorer.dynamic_timeout.enable",
            "goes by how long samples usually take, but nobody measures a sample's usual time; set it to false, and explorer.max_timeout",
        )
    for key in (wait_key, "explorer.dynamic_timeout.enable", "explorer.dynamic_timeout.ratio"):
        if key in work.together:
            work.notes.append(f"{key}: {_said(work, key)} is of nothing that is switched on")


def _kl(work: Work) -> None:
    name_key, weight_key = "algorithm.kl_loss_fn", "algorithm.kl_loss_fn_args.kl_coef"
    name, weight = _said(work, name_key), _said(work, weight_key)
    if name == "none":
        work.put(_path(work, name_key), [("actor.kl_ctl", 0.0)])
        if weight is not None:
            work.notes.append(f"{weight_key}: {weight} is the weight of no KL, as kl_loss_fn is none")
        return
    if name is not None:
        if name not in ("k1", "k2", "k3"):
            raise _fault(work, name_key, f"is {name!r}; here there are k1, k2, k3 and none")
        work.put(_path(work, name_key), [("actor.kl_estimator", name)])
    if weight is not None:
        work.put(_path(work, weight_key), [("actor.kl_ctl", weight)])
    elif name is not None:
        work.put(_path(work, name_key), [("actor.kl_ctl", KL_COEFFICIENT)])


def _entropy(work: Work) -> None:
    name_key, weight_key = "algorithm.entropy_loss_fn", "algorithm.entropy_loss_fn_args.entropy_coef"
    name, weight = _said(work, name_key, "default"), _said(work, weight_key)
    if name not in ("default", "none"):
        raise _fault(work, name_key, f"is {name!r}; here there are default and none")
    if name_key in work.together:
        work.notes.append(f"{name_key}: {name} (as here)")
    if weight is None:
        return
    if name == "none":
        work.notes.append(f"{weight_key}: {weight} is the weight of nothing, as entropy_loss_fn is none")
    else:
        work.put(_path(work, weight_key), [("actor.entropy_coef", weight)])


def _replay(work: Work) -> None:
    given = {key.removeprefix(_REPLAY): value for key, (_, value) in work.together.items() if key.startswith(_REPLAY)}
    if not given:
        return
    if not given.pop("enable", False):
        work.notes.append(f"{_REPLAY[:-1]}: not enabled, so each experience is used once, in order")
        return
    work.put(_path(work, f"{_REPLAY}enable"), [("store.order", "priority")])
    cooldown = given.pop("reuse_cooldown_time", None)
    if cooldown is None:
        work.notes.append(f"{_REPLAY}reuse_cooldown_time: not set, so each experience is used once")
    else:
        again = [("store.cooldown_seconds", cooldown), ("store.uses", None)]
        work.put(_path(work, f"{_REPLAY}reuse_cooldown_time"), again)
    for key, value in given.items():
        work.put(_path(work, f"{_REPLAY}{key}"), [(f"store.{key}", value)])
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
        work.put(_path(work, key), [("store.train_batch_size", size)])
    elif size == whole:
        work.notes.append(f"{key}: {size} (batch_size × repeat_times, as here)")
    else:
        raise _fault(
            work,
            key,
            f"is {size}, but in mode both a step trains on what it explored: batch_size × repeat_times = {whole}; set it to that, or "
            "run mode explore beside mode train",
        )


def _synchronisation(work: Work) -> None:
    """Weights move every ``interval`` steps, and explorers are ``offset`` batches further ahead."""
    interval_key, offset_key = "synchronizer.sync_interval", "synchronizer.sync_offset"
    if interval_key not in work.together and offset_key not in work.together:
        return
    interval, offset = _whole(work, interval_key, 1, otherwise=1), _whole(work, offset_key, 0, otherwise=0)
    if interval_key in work.together:
        work.put(_path(work, interval_key), [("rollout.weight_update_every_steps", interval)])
    work.put(_path(work, offset_key, interval_key), [("rollout.max_head_offpolicyness", interval - 1 + offset)])
    work.notes.append(
        f"synchronizer: weights move after every {interval} steps of the trainer, and no token is trained that is more than "
        f"sync_interval - 1 + sync_offset = {interval - 1 + offset} steps old; explorers wait where they would be further ahead"
    )


def _whole(work: Work, key: str, least: int, otherwise: int = 0) -> int:
    value = _said(work, key, otherwise)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _fault(work, key, f"is {value!r}; it is a whole number of at least {least}")
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
        raise _fault(work, key, "bounds a prompt together with model.max_response_tokens, which is not set; set it, too")
    else:
        rollout["context_length"] = _whole(work, key, 1) + response
        work.notes.append(f"{key} + max_response_tokens -> rollout.context_length: {rollout['context_length']}")
