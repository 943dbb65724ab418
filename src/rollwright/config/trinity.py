"""Files in Trinity-RFT's shape, translated key by key into the project's own config.

Every key that such a file may hold stands in one of the tables of ``trinity_keys``: what it becomes here, or the one value at which it
asks for what happens here anyway. A key in no table is refused by name: nothing is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollwright.config.source import Document, KeyPath, Origins, Override, dotted
from rollwright.config.trinity_keys import (
    ALREADY_SO,
    CONVERTED,
    EVAL_TASKSET_DEFAULTS,
    KNOWN,
    REFUSED,
    RENAMED,
    TASKSET_DEFAULTS,
    TOGETHER,
    hint,
)
from rollwright.config.trinity_tasksets import finish_tasksets, take_taskset_key
from rollwright.config.trinity_together import decide_together
from rollwright.config.trinity_work import Work
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
        _take(work, path, value)
    _finish(work)
    return Translation(Document(work.data, file=document.file, written=work.written), work.notes)


def _take(work: Work, path: KeyPath, value: Any) -> None:
    """Translate one key, or note why it cannot be."""
    key = dotted(path)
    try:
        if value in ({}, []):
            value = None  # an empty section says as little as null
        if section := next((name for name in REFUSED if key == name or key.startswith(f"{name}.")), None):
            if value is not None:
                work.once(path[: section.count(".") + 1], REFUSED[section])
        elif take_taskset_key(work, path, value):
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
    decide_together(work)
    if len(work.places_of_tasksets) > 1:
        sections = ", ".join(f"{name} ({work.origins.of(p)})" for name, p in work.places_of_tasksets.items())
        work.faults.append(f"buffer.explorer_input has {sections}, which are places of the same tasks; keep one")
    if work.faults:
        count = f"{len(work.faults)} keys" if len(work.faults) > 1 else "a key"
        raise ConfigError(f"{count} of this Trinity-shaped file cannot be taken:\n" + "\n".join(f"  {f}" for f in work.faults))
    mode = work.data.get("mode", "both")
    if not work.data.get("tasksets") and mode in ("both", "explore"):
        raise ConfigError(f"{work.origins.document.file}: no buffer.explorer_input.taskset: there is nothing to explore.")
    finish_tasksets(work)
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
