"""The tasksets of Trinity-shaped files: where each stands, what its keys become, and what is decided when all have been read."""

from __future__ import annotations

from typing import Any

from rollwright.config.generation import ALIASES
from rollwright.config.source import KeyPath, dotted
from rollwright.config.trinity_keys import FORMAT_REFUSED, SELECTORS, TASKSET_RENAMED, choice, hint
from rollwright.config.trinity_work import Work
from rollwright.errors import ConfigError

INPUT = ("buffer", "explorer_input")
#: Keys of a taskset that hold keys themselves.
_SECTIONS = ("format", "rollout_args", "data_selector", "task_selector")


def take_taskset_key(work: Work, path: KeyPath, value: Any) -> bool:
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
    _take(work, path, f"{place}.", inner, value)
    return True


def _take(work: Work, path: KeyPath, target: str, inner: KeyPath, value: Any) -> None:
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
            work.notes.append(f"{dotted(path)}: the name is {name}; it is read all the same")
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
            work.put(path, [(f"{target}rollout_args.{ALIASES.get(rest, rest)}", value)])
    elif rest == "selector_type":
        work.put(path, [(f"{target}selector", SELECTORS[choice(value, *SELECTORS)])])
    elif head in ("data_selector", "task_selector"):
        work.put(path, [(f"{target}selector_args.{rest}", value)])
    else:
        raise ConfigError(f"cannot be honoured here{hint(path, [(*path[: -len(inner)], name) for name in TASKSET_RENAMED])}")


def finish_tasksets(work: Work) -> None:
    """Give tasksets the defaults of their section, the response's length, and the group that ``n`` means."""
    training = work.data.get("tasksets", [])
    response = work.data.get("gconfig", {}).get("max_new_tokens")
    for index, taskset in enumerate([*training, *work.data.get("eval_tasksets", [])]):
        taskset.setdefault("name", f"taskset{index}")
        for key, value in {**work.defaults, **(work.eval_defaults if index >= len(training) else {})}.items():
            taskset.setdefault(key, value)
        if response is not None:
            taskset.setdefault("rollout_args", {}).setdefault("max_new_tokens", response)
    own_lengths = [taskset.get("rollout_args", {}).get("max_new_tokens") for taskset in training]
    if response is not None and own_lengths and response not in own_lengths:
        work.data["gconfig"]["max_new_tokens"] = own_lengths[0]
        work.notes.append(
            f"model.max_response_tokens: {response} is of no taskset that is trained on, as all have a rollout_args.max_tokens, which wins"
        )
    for taskset in training:
        own = taskset.get("rollout_args", {}).get("n_samples")
        group = work.data.get("gconfig", {}).get("n_samples")
        if own is not None and group is None:
            taskset.setdefault("repeat_times", own)
            work.notes.append(f"tasksets {taskset['name']}: rollout_args.n -> repeat_times: {own}")
        elif own not in (None, group):
            work.notes.append(f"tasksets {taskset['name']}: algorithm.repeat_times ({group}) wins over rollout_args.n ({own})")
    _finish_evaluation(work, response)


def _finish_evaluation(work: Work, response: int | None) -> None:
    if work.data.get("eval_tasksets"):
        if response is None:
            work.data.setdefault("evaluator", {}).setdefault("gconfig", {"greedy": False})
    elif work.data.pop("evaluator", None):
        work.notes.append("explorer: there are no eval_tasksets, so nothing is evaluated, at whatever interval")
