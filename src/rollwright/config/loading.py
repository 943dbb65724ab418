"""Loads configs: reads YAML, applies ``key=value`` overrides, resolves interpolations, validates, and checks the rules between fields.

A file describes one experiment, or a run of several stages: create a model, warm it up, train it, evaluate it. A file with several
stages has shared keys at its top level and a list ``stages:``. Each stage has a ``kind``, a ``name`` and its own keys, which are
merged over the shared ones. A shared key applies to the stages whose config has that key. A shared key that applies to no stage is
an error, and so is an unknown key of a stage. A file without ``stages`` is a single stage of the ``kind`` that it names (default: ``rl``).

The command line overrides the file: ``key=value`` in every stage that has the key, ``stages.NAME.key=value`` in that stage alone.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

import xxhash

from rollwright.config.experiment import STAGE_CLASSES, BaseExperimentConfig
from rollwright.config.faults import Faults, has_key, reset
from rollwright.config.generation import ALIASES
from rollwright.config.interpolation import resolve
from rollwright.config.overrides import merge_overrides, parse_override
from rollwright.config.recipes import apply_recipe
from rollwright.config.rules import faults_of
from rollwright.config.source import (
    Document,
    KeyPath,
    Origins,
    Override,
    dialects,
    dump_yaml,
    merge,
    plain,
    read_yaml,
)
from rollwright.config.validation import annotations_of, choices_of, elsewhere, is_section, names_besides, validated
from rollwright.errors import ConfigError
from rollwright.registry import PLUGINS, import_path, nearest

logger = logging.getLogger("rollwright.config")

ConfigType = TypeVar("ConfigType")


def load_expr_config(argv: Sequence[str], config_class: type[ConfigType]) -> tuple[ConfigType, str]:
    """Load one experiment's config.

    Performs the checks of ``rollwright config check``, except that workflow, path and dataset may be missing, because they can still be
    set in Python.

    Args:
        argv: ``["--config", FILE, "key=value", …]`` or ``[FILE, "key=value", …]``.
        config_class: ``GRPOConfig``, ``SFTConfig``, … or a user's subclass with additional fields.

    Returns:
        The config and the path of the file.

    Raises:
        ConfigError: lists every fault with its key and file:line (or the override that set it).
    """
    file, overrides = split_arguments(argv)
    document = read_yaml(file)
    if "stages" in document.data:
        raise ConfigError(
            f"{Origins(document).of(('stages',))}: this file has stages; run it with 'rollwright run', or load it "
            "with rollwright.load_stages."
        )
    document, parsed = _translated(document, [parse_override(text) for text in overrides])
    config = build_config(document, parsed, config_class)
    # Resolving the names loads torch, so it happens only here and in `rollwright config check`.
    import_path("rollwright.trainers.checks.unknown_names:refuse_unknown_names", "check")(
        [Stage("", "", config, 0, Origins(document, parsed))]
    )
    return config, file


def split_arguments(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Split a command line into the config file and the overrides.

    Raises:
        ConfigError: not exactly one config file is given.
    """
    words = list(argv)
    while "--config" in words:
        at = words.index("--config")
        words[at : at + 2] = [f"--config={''.join(words[at + 1 : at + 2])}"]
    overrides = [word for word in words if "=" in word and not word.startswith("--config=")]
    files = [word.removeprefix("--config=") for word in words if word not in overrides]
    if len(files) != 1 or not files[0]:
        got = f"got {', '.join(files)}" if any(files) else "none was given"
        raise ConfigError(f"give one config file (--config FILE) and key=value overrides; {got}.")
    return files[0], overrides


def build_config(document: Document, overrides: Sequence[str | Override], config_class: type[ConfigType]) -> ConfigType:
    """Build ``config_class`` from a document and overrides, with all checks; see ``load_expr_config``."""
    parsed = [parse_override(item) if isinstance(item, str) else item for item in overrides]
    faults = Faults(Origins(document, parsed))
    config = _build(config_class, merge_overrides(document.data, parsed), faults)
    if faults.found:
        raise ConfigError.of(faults.messages)
    return config


def _build(cls: type, data: dict[str, Any], faults: Faults, around: dict[str, Any] | None = None) -> Any:
    """Build one config from its keys as written. Interpolations may also refer to the keys of ``around``."""
    resolved = resolve(data, [BaseExperimentConfig, cls], faults.origins, around)
    _import_plugins(resolved, faults)
    config = validated(cls, resolved, faults)
    if faults.found:
        return None
    if hasattr(config, "actor"):
        try:
            apply_recipe(config, set(_written_keys(resolved)))
        except ConfigError as error:
            faults.add(("actor", "recipe"), str(error))
            return None
    for path, message in faults_of(config):
        faults.add(path, message)
    return config


def _import_plugins(data: dict[str, Any], faults: Faults) -> None:
    """Import the plugins. Their paths, which are relative to the config file, are replaced by absolute ones."""
    listed = data.get("plugins")
    if not isinstance(listed, list) or not all(isinstance(source, str) for source in listed):
        return  # not given, or reported by the validation
    for index, source in enumerate(listed):
        try:
            listed[index] = PLUGINS.add(source, faults.origins.directory(("plugins", index)))
            PLUGINS.load()
        except ConfigError as error:
            faults.add(("plugins", index), str(error))


def _written_keys(data: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of keys that hold values rather than sections, with aliases of generation arguments resolved."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _written_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{ALIASES.get(key, key)}"


def config_to_dict(config: Any) -> dict[str, Any]:
    """Convert a config to plain containers, with every key."""
    return plain(config)


def is_default(cls: type, path: Sequence[str], value: Any) -> bool:
    """Return whether a plain value is the default of a key of a config class, also below sections that are optional or in lists.

    Args:
        cls: the config class.
        path: names of the key, without numbers in lists.
        value: the value, as in ``config_to_dict``.
    """
    name, *below = path
    if name not in annotations_of(cls):
        return False
    if not below:
        return config_to_dict(cls())[name] == value
    kinds = [choice for kind in choices_of(annotations_of(cls)[name]) for choice in (kind, *get_args(kind))]
    return any(is_default(kind, below, value) for kind in kinds if is_section(kind))


def to_yaml(config: Any) -> str:
    """Return a config as YAML that loads to the same config."""
    return dump_yaml(plain(config))


_CHECKSUM = "# checksum: "


def save_config(config: Any, file: str | Path) -> None:
    """Write ``to_yaml(config)`` to a file, with a checksum in its last line."""
    text = to_yaml(config)
    Path(file).write_text(f"{text}{_CHECKSUM}{xxhash.xxh3_64_hexdigest(text.encode())}\n", encoding="utf-8")


def is_as_written(text: str, *, has_checksum: bool) -> bool:
    """Return False if a file from ``save_config`` was changed or damaged. Files of version 0.1.0 have no checksum (``has_checksum=False``)."""
    before, mark, checksum = text.rpartition(_CHECKSUM)
    return not has_checksum if not mark else checksum.strip() == xxhash.xxh3_64_hexdigest(before.encode())


#: Keys of a stage that are not part of its config.
_STAGE_KEYS = ("stages", "kind", "name")

#: Keys of an evaluation without a config file.
_EVALUATION = {"experiment_name": "eval", "workflow": "rollwright.workflows.rlvr.RLVRWorkflow"}


@dataclass
class Stage:
    """One stage of a run. ``origins`` records where its keys were written, for messages."""

    name: str
    kind: str
    config: Any
    index: int
    origins: Origins = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Convert the stage to plain containers: kind, name and every setting."""
        return {"kind": self.kind, "name": self.name, **config_to_dict(self.config)}


def load_stages(file: str | Path, overrides: Sequence[str] = ()) -> list[Stage]:
    """Load the stages of a config file.

    Args:
        file: the YAML file.
        overrides: ``key=value`` for every stage that has the key, or ``stages.NAME.key=value`` for one stage (by name or position).

    Returns:
        The stages in order. A file without ``stages`` is one stage.

    Raises:
        ConfigError: lists every fault of every stage with its key and file:line (or override).
    """
    document, parsed = _translated(read_yaml(file), [parse_override(text) for text in overrides])
    return build_stages(document, parsed)


def _translated(document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
    """Translate a file in another system's form to the project's own; overrides may be written in either form."""
    for dialect in dialects():
        if (adopted := dialect().adopt(document, overrides)) is not None:
            logger.info("%s has %s's shape; it is read as this project's config:", document.file, dialect.system)
            for note in adopted[0].notes:
                logger.info("  %s", note)
            return adopted
    return document, list(overrides)


def load_eval_stages(file: str | Path | None, overrides: Sequence[str] = ()) -> list[Stage]:
    """Load the evaluations of a config file: its eval stages or, if it has none, one stage built from the keys that apply to evaluations.

    Args:
        file: any config file. If None, the keys come from ``overrides``.
        overrides: see ``load_stages``.

    Raises:
        ConfigError: as in ``load_stages``, except that keys of other kinds of stages are ignored.
    """
    document = read_yaml(file) if file is not None else Document(dict(_EVALUATION), file="command line")
    listed = document.data.get("stages") or []
    if not any(isinstance(stage, dict) and stage.get("kind") == "eval" for stage in listed):
        stage: dict[str, Any] = {"kind": "eval", "name": "eval"}
        if isinstance(valid := document.data.get("valid_dataset"), dict):
            stage["dataset"] = {"split": "valid", **valid}
        document = dataclasses.replace(document, data={**document.data, "stages": [stage]})
    return build_stages(document, [parse_override(text) for text in overrides], only="eval")


def build_stages(document: Document, overrides: Sequence[Override], only: str | None = None) -> list[Stage]:
    """Build the stages of a document, or ``only`` those of one kind; see ``load_stages``.

    With ``only``, the document may have keys for other stages, but each override has to change a stage that is built.
    """
    file = _File(document, overrides, only)
    stages = file.stages()
    if only is None:
        file.refuse_unused_keys()
    else:
        file.refuse_idle_overrides()
    file.refuse_unread_keys()
    if file.faults:
        raise ConfigError.of(file.faults)
    return stages


class _File:
    """Builds the stages of a document with overrides, or ``only`` those of one kind.

    Raises:
        ConfigError: ``stages`` is not a list of mappings.
    """

    def __init__(self, document: Document, overrides: Sequence[Override], only: str | None) -> None:
        self.document, self.overrides, self.only = document, overrides, only
        self.own = [override for override in overrides if override.path[0] == "stages"]
        self.shared = [override for override in overrides if override.path[0] != "stages"]
        self.origins = Origins(document, list(overrides))
        self.written = merge_overrides(document.data, self.own)
        self.around = merge_overrides(self.written, self.shared)
        self.faults: list[str] = []
        self.configs: list[Any] = []  # of the stages built so far
        self.unread: dict[KeyPath, list[str]] = {}  # shared keys, and the faults of the stages that do not read them
        #: True if the file lists no stages, so it is a single stage.
        self.alone = "stages" not in self.written
        self.listed: list[dict[str, Any]] = [{"kind": "rl", **self.around}] if self.alone else self.written["stages"]
        where = self.origins.of(("stages",))
        if not isinstance(self.listed, list) or not self.listed:
            raise ConfigError(f"{where}: stages: expected a list of stages, each with a kind: {', '.join(STAGE_CLASSES)}.")
        for index, keys in enumerate(self.listed):
            if not isinstance(keys, dict):
                where = self.origins.of(("stages", index))
                raise ConfigError(f"{where}: stages.{index}: expected a mapping with kind and the stage's keys, got {keys!r}.")
        #: Position and keys of the stages to build.
        self.chosen = [(index, keys) for index, keys in enumerate(self.listed) if only in (None, keys.get("kind"))]

    def stages(self) -> list[Stage]:
        """Build the stages. Faults are collected."""
        built = [self.stage(index, keys) for index, keys in self.chosen]
        stages = [stage for stage in built if stage is not None]
        self.refuse_repeated_names(stages)
        return stages

    def stage(self, index: int, keys: dict[str, Any]) -> Stage | None:
        """Build one stage from its own and the shared keys. Faults are collected; the result is unusable if there are any."""
        kind = keys.get("kind")
        name = keys.get("name", kind)
        mine = [
            dataclasses.replace(override, path=override.path[2:])
            for override in self.own
            if len(override.path) > 2 and override.path[1] in (index, name)
        ]
        origins = Origins(self.document, [*self.shared, *mine], (() if self.alone else ("stages", index), ()))
        if kind not in STAGE_CLASSES:
            label = "has no kind" if kind is None else f"kind: there is no kind {kind!r}"
            self.faults.append(f"{origins.of(('kind',))}: stages.{index}: {label}; {nearest(kind or '', STAGE_CLASSES)}")
            return None
        data = {key: value for key, value in keys.items() if key not in _STAGE_KEYS}
        if not self.alone:
            known = _keys_of(STAGE_CLASSES[kind]).difference(_STAGE_KEYS)
            reaching = [override for override in self.shared if override.path[0] in known]
            own = [override for override in mine if override.path[0] not in _STAGE_KEYS]
            data = merge({key: value for key, value in self.written.items() if key in known}, data)
            data = merge_overrides(data, [*reaching, *own])
        faults = Faults(origins)
        try:
            config = _build(STAGE_CLASSES[kind], data, faults, self.around)
        except ConfigError as error:  # an interpolation failed
            self.faults.append(str(error))
            return None
        self._pass_shared(config, faults, keys, mine)
        if not faults.found:
            for path, message in _missing(kind, config):
                faults.add(path, message)
        self.faults += faults.messages
        self.configs.append(config)
        return Stage(str(name), kind, config, index, origins)

    def _pass_shared(self, config: Any, faults: Faults, keys: dict[str, Any], mine: Sequence[Override]) -> None:
        """Defer faults of shared keys that this stage does not read, as another stage may read them, and reset the keys to their defaults."""
        own = [override.path for override in mine]
        shared = {
            path
            for path in faults.unread
            if not self.alone and not _holds(keys, path) and not any(path[: len(each)] == each for each in own)
        }
        for _, path, message in faults.found:
            if path in shared:
                self.unread.setdefault(path, []).append(message)
                reset(config, path)
        faults.found = [fault for fault in faults.found if fault[1] not in shared]

    def refuse_unread_keys(self) -> None:
        """Report shared keys that no stage reads. Skipped if a stage has other faults, because that stage may read them.

        If only some stages are built, the others may read the file's keys; those of overrides are reported.
        """
        if self.faults:
            return
        for path, messages in self.unread.items():
            is_given = self.only is None or any(_overlap(path, override.path) for override in self.shared)
            if is_given and len(messages) == sum(has_key(config, path) for config in self.configs):
                self.faults.append(messages[0])

    def refuse_repeated_names(self, stages: Sequence[Stage]) -> None:
        """Report stages that share a name, because overrides and the run directory identify stages by name."""
        first: dict[str, int] = {}
        for stage in stages:
            if first.setdefault(stage.name, stage.index) != stage.index:
                self.faults.append(
                    f"{self.origins.of(('stages', stage.index))}: stages.{stage.index}: the name {stage.name!r} is taken by stage "
                    f"{first[stage.name]}; give each stage a name of its own."
                )

    def refuse_unused_keys(self) -> None:
        """Report shared keys that no stage has, because they would have no effect."""
        kinds = [keys.get("kind") for keys in self.listed]
        if self.alone or not all(kind in STAGE_CLASSES for kind in kinds):
            return  # keys of a single stage are validated; a stage of unknown kind, which is reported already, might have the key
        known = {name for kind in kinds for name in _keys_of(STAGE_CLASSES[str(kind)])}
        given = [*(key for key in self.document.data if key != "stages"), *(str(override.path[0]) for override in self.shared)]
        for key in dict.fromkeys(given):
            if key not in known:
                hints = [elsewhere(STAGE_CLASSES[str(kind)], key) for kind in kinds]
                hint = next(filter(None, hints), "") or nearest(key, known)
                self.faults.append(f"{self.origins.of((key,))}: {key}: no stage of this file has such a key; {hint}")

    def refuse_idle_overrides(self) -> None:
        """Report overrides that change none of the stages that are built. Skipped if there are other faults."""
        if self.faults:
            return
        known = {name for _, keys in self.chosen for name in _keys_of(STAGE_CLASSES[keys["kind"]])}
        names = [keys.get("name", keys["kind"]) for _, keys in self.chosen]
        stages = {*names, *(index for index, _ in self.chosen)}
        for at, override in enumerate(self.overrides):
            first, *below = override.path
            if first in known or (first == "stages" and stages.intersection(below[:1])):
                continue
            without = _File(self.document, [*self.overrides[:at], *self.overrides[at + 1 :]], self.only)
            without.stages()
            if without.configs == self.configs:  # else an interpolation refers to it
                why = f"only {', '.join(names)} is carried out" if first == "stages" else nearest(str(first), known)
                self.faults.append(f"override {override.text!r}: no {self.only} stage has such a key; {why}")


def _keys_of(cls: type) -> set[str]:
    return {*(field.name for field in dataclasses.fields(cls)), *names_besides(cls)}


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    """Return True if one path is the other or leads to it."""
    return all(mine == theirs for mine, theirs in zip(one, other, strict=False))


def _holds(keys: Any, path: KeyPath) -> bool:
    """Return True if a stage's own keys set the value at ``path``."""
    for part in path:
        if not isinstance(keys, dict):
            return True  # the section was replaced by a value
        if part not in keys:
            return False
        keys = keys[part]
    return True


#: Keys that a stage of each kind needs, and what each is.
_NEEDED: dict[str, dict[str, str]] = {
    "model": {"path": "the directory to write the model to"},
    "sft": {"model.path": "the model to train", "train_dataset.path": "the rows to train on"},
    "dpo": {"model.path": "the model to train", "train_dataset.path": "the pairs of replies to train on"},
    "rl": {
        "actor.path": "the model to train",
        "train_dataset.path": "the tasks to train on",
        "workflow": "the code of an episode, such as rollwright.workflows.rlvr.RLVRWorkflow",
    },
    "eval": {
        "path": "the model to evaluate (`rollwright eval` has --model)",
        "dataset.path": "the tasks to evaluate on (`rollwright eval TASKS`)",
        "workflow": "the code of an episode, such as rollwright.workflows.rlvr.RLVRWorkflow",
    },
}


def _missing(kind: str, config: Any) -> list[tuple[KeyPath, str]]:
    """Return the keys that the stage needs but that are empty, each with a message."""
    needed = dict(_NEEDED[kind])
    if kind == "rl" and (config.tasksets or config.mode != "both"):
        del needed["train_dataset.path"], needed["workflow"]  # tasksets bring both; other modes say what they need
    return [
        (tuple(key.split(".")), f"is not set: {what}") for key, what in needed.items() if not operator.attrgetter(key)(config)
    ]
