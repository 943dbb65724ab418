"""Reading a config: YAML, then ``key=value`` overrides, then interpolation, then validation, then the rules between fields.

A file is one experiment, or a run of several stages: make a model, warm it up, train it, evaluate it. It then has shared keys at
its top level and a list ``stages:``. Each stage has a ``kind``, a ``name`` and keys of its own, which are merged over the shared
ones. A shared key reaches the stages whose config has it; one that reaches none is refused, as is an unknown key of a stage. A
file without ``stages`` is one stage of the ``kind`` it names (``rl`` unless it does).

The command line wins over the file: ``key=value`` in every stage that has the key, ``stages.NAME.key=value`` in that stage alone.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollwright.config.experiment import BaseExperimentConfig, DPOConfig, EvalConfig, GRPOConfig, NewModelConfig, SFTConfig
from rollwright.config.recipes import apply_recipe
from rollwright.config.rules import faults_of
from rollwright.config.source import (
    DIALECTS,
    Document,
    KeyPath,
    Origins,
    Override,
    apply_override,
    dotted,
    dump_yaml,
    merge,
    parse_override,
    plain,
    read_yaml,
    resolve,
)
from rollwright.config.validation import Builder, names_besides
from rollwright.errors import ConfigError
from rollwright.registry import PLUGINS, nearest

logger = logging.getLogger("rollwright.config")

ConfigType = TypeVar("ConfigType")


def load_expr_config(argv: Sequence[str], config_class: type[ConfigType]) -> tuple[ConfigType, str]:
    """Load one experiment's config.

    Args:
        argv: ``["--config", FILE, "key=value", …]`` or ``[FILE, "key=value", …]``.
        config_class: ``GRPOConfig``, ``SFTConfig``, … or a subclass of the user's with fields of its own.

    Returns:
        The config and the path of the file.

    Raises:
        ConfigError: naming every fault with its key and file:line (or the override that brought it).
    """
    file, overrides = split_arguments(argv)
    document = read_yaml(file)
    if "stages" in document.data:
        raise ConfigError(
            f"{file}:{document.lines.get(('stages',), 1)}: this file has stages; run it with 'rollwright run', or load it "
            "with rollwright.load_stages."
        )
    return build_config(document, overrides, config_class), file


def split_arguments(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The config file and the overrides of a command line.

    Raises:
        ConfigError: no file, several files, or an argument that is neither.
    """
    files: list[str] = []
    overrides: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config":
            files.append(next(arguments, ""))
        elif argument.startswith("--config="):
            files.append(argument.removeprefix("--config="))
        elif "=" in argument:
            overrides.append(argument)
        else:
            files.append(argument)
    if len(files) != 1 or not files[0]:
        got = f"got {', '.join(files)}" if any(files) else "none was given"
        raise ConfigError(f"give one config file (--config FILE) and key=value overrides; {got}.")
    return files[0], overrides


def build_config(document: Document, overrides: Sequence[str | Override], config_class: type[ConfigType]) -> ConfigType:
    """Build ``config_class`` from a document and overrides, with all checks; see ``load_expr_config``."""
    parsed = [parse_override(item) if isinstance(item, str) else item for item in overrides]
    origins = Origins(document, parsed)
    data = merge_overrides(document.data, parsed)
    builder = Builder(origins)
    resolved = resolve(data, [BaseExperimentConfig, config_class], origins)
    import_plugins(resolved, builder)
    config = builder.build(config_class, resolved)
    builder.raise_faults()
    if hasattr(config, "actor"):
        try:
            apply_recipe(config, set(written_keys(resolved)))
        except ConfigError as error:
            builder.fault(("actor", "recipe"), str(error))
    for path, message in faults_of(config):
        builder.fault(path, message)
    builder.raise_faults()
    return config


def import_plugins(data: dict[str, Any], builder: Builder) -> None:
    """Import what ``plugins`` names, and make its paths absolute: they are relative to the file that names them."""
    listed = data.get("plugins")
    if not isinstance(listed, list) or not all(isinstance(source, str) for source in listed):
        return  # not given, or told when it is validated
    for index, source in enumerate(listed):
        try:
            listed[index] = PLUGINS.add(source, builder.origins.directory(("plugins", index)))
            PLUGINS.load()
        except ConfigError as error:
            builder.fault(("plugins", index), str(error))


def written_keys(data: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the keys that hold values rather than sections."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from written_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def merge_overrides(data: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """A copy of ``data`` in which the overrides are set, in order."""
    data = copy.deepcopy(data)
    for override in overrides:
        apply_override(data, override)
    return data


def config_to_dict(config: Any) -> dict[str, Any]:
    """A config as plain containers, every key with its value."""
    return plain(config)


def to_yaml(config: Any) -> str:
    """A config as YAML that loads to the same config."""
    return dump_yaml(config_to_dict(config))


def save_config(config: Any, file: str | Path) -> None:
    """Write ``to_yaml(config)`` to a file."""
    Path(file).write_text(to_yaml(config), encoding="utf-8")


#: What a stage of each kind is told.
STAGE_CLASSES: dict[str, type] = {
    "model": NewModelConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rl": GRPOConfig,
    "eval": EvalConfig,
}

#: Keys of a stage, and of a file, that are no settings of the stage's config.
_STAGE_KEYS = ("kind", "name")
_FILE_KEYS = ("stages", "kind", "name")


#: What an evaluation from the command line alone starts from.
_EVALUATION = {"experiment_name": "eval", "workflow": "rollwright.workflows.rlvr.RLVRWorkflow"}


@dataclass
class Stage:
    """One stage of a run, ready to be carried out."""

    name: str
    kind: str
    config: Any
    index: int = 0
    source: str = ""
    origins: Origins | None = field(default=None, repr=False, compare=False)

    def place(self, path: KeyPath) -> str:
        """Where a key was written: ``file:line``, or the override's text."""
        return self.source if self.origins is None else self.origins.of(path)

    def written(self, path: KeyPath) -> str:
        """What messages call a key."""
        return dotted(path) if self.origins is None else self.origins.name(path)

    def to_dict(self) -> dict[str, Any]:
        """Kind, name and every setting, as plain containers."""
        return {"kind": self.kind, "name": self.name, **config_to_dict(self.config)}


def load_stages(file: str | Path, overrides: Sequence[str] = ()) -> list[Stage]:
    """Load a config file as its stages.

    Args:
        file: the YAML file.
        overrides: ``key=value`` for every stage that has the key, ``stages.NAME.key=value`` (or by position) for one.

    Returns:
        The stages in their order; one for a file without ``stages``.

    Raises:
        ConfigError: naming every fault of every stage with its key and file:line (or override).
    """
    document, parsed = _translated(read_yaml(file), [parse_override(text) for text in overrides])
    return build_stages(document, parsed)


def _translated(document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
    """A file of another system's shape in the project's own; overrides may be written in either."""
    dialect = next((DIALECTS.get(name)() for name in DIALECTS if DIALECTS.get(name)().recognises(document.data)), None)
    if dialect is None:
        return document, list(overrides)
    ours = {field.name for field in dataclasses.fields(GRPOConfig)} - set(document.data) - {"mode", "cluster"}
    theirs = [override for override in overrides if override.path[0] not in ours]
    origins = Origins(document, theirs)
    translation = dialect.translate(resolve(merge_overrides(document.data, theirs), [], origins), document, theirs)
    logger.info("%s has %s's shape; it is read as this project's config:", document.file, dialect.system)
    for note in translation.notes:
        logger.info("  %s", note)
    return translation.document, [override for override in overrides if override not in theirs]


def load_eval_stages(file: str | Path | None, overrides: Sequence[str] = ()) -> list[Stage]:
    """The evaluations of a config file: its eval stages, or one made of the keys that an evaluation has.

    Args:
        file: any config file; None: everything is in ``overrides``.
        overrides: as for ``load_stages``.

    Raises:
        ConfigError: as ``load_stages``; keys of other kinds of stages are left aside.
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
    """Build the stages of a document, all or ``only`` those of one kind; see ``load_stages``."""
    faults: list[str] = []
    own = [override for override in overrides if override.path[0] == "stages"]
    shared = [override for override in overrides if override.path[0] != "stages"]
    written = merge_overrides(document.data, own)
    listed = _listed(written, document)
    chosen = [(index, keys) for index, keys in enumerate(listed) if only is None or (keys or {}).get("kind") == only]
    stages = [_build(document, written, keys, index, shared, own, faults) for index, keys in chosen]
    _refuse_repeated_names(stages, document, faults)
    if only is None:
        _refuse_unused_keys(document, overrides, shared, listed, faults)
    if faults:
        faults = list(dict.fromkeys(faults))
        raise ConfigError(faults[0] if len(faults) == 1 else f"{len(faults)} faults:\n" + "\n".join(f"  {f}" for f in faults))
    return [stage for stage in stages if stage is not None]


def _listed(data: dict[str, Any], document: Document) -> list[dict[str, Any] | None]:
    """The stages' own keys; ``None`` stands for the one stage of a file that lists none."""
    if "stages" not in data:
        return [None]
    stages = data["stages"]
    where = f"{document.file}:{document.lines.get(('stages',), 1)}"
    if not isinstance(stages, list) or not stages:
        raise ConfigError(f"{where}: stages: expected a list of stages, each with a kind: {', '.join(STAGE_CLASSES)}.")
    for index, stage in enumerate(stages):
        if not isinstance(stage, dict):
            where = f"{document.file}:{document.lines.get(('stages', index), 1)}"
            raise ConfigError(f"{where}: stages.{index}: expected a mapping with kind and the stage's keys, got {stage!r}.")
    return stages


def _build(
    document: Document,
    written: dict[str, Any],
    own_keys: dict[str, Any] | None,
    index: int,
    shared: Sequence[Override],
    own: Sequence[Override],
    faults: list[str],
) -> Stage | None:
    common = {key: value for key, value in written.items() if key not in _FILE_KEYS}
    place: KeyPath = () if own_keys is None else ("stages", index)
    head = merge_overrides(written, shared) if own_keys is None else own_keys
    name = head.get("name", head.get("kind", "rl"))
    mine = [_relative(override, place, name) for override in own]
    origins = Origins(document, [*shared, *(override for override in mine if override)], (place, ()) if place else ((),))
    kind = head.get("kind", "rl") if own_keys is None else head.get("kind")
    if kind not in STAGE_CLASSES:
        label = "has no kind" if kind is None else f"kind: there is no kind {kind!r}"
        faults.append(f"{origins.of(('kind',))}: stages.{index}: {label}; {nearest(kind or '', STAGE_CLASSES)}")
        return None
    cls = STAGE_CLASSES[kind]
    builder = Builder(origins)
    known = {field.name for field in dataclasses.fields(cls)} | set(names_besides(cls))
    keys = {key: value for key, value in (own_keys or {}).items() if key not in _STAGE_KEYS}
    data = merge({key: value for key, value in common.items() if key in known or own_keys is None}, keys)
    reaching = [o for o in shared if o.path[0] in known or (own_keys is None and o.path[0] not in _FILE_KEYS)]
    data = merge_overrides(data, reaching)
    data = merge_overrides(data, [override for override in mine if override and override.path[0] not in _STAGE_KEYS])
    try:
        around = merge_overrides({**written, **common}, shared)
        resolved = resolve(data, [BaseExperimentConfig, cls], origins, around)
        import_plugins(resolved, builder)
        config = builder.build(cls, resolved)
    except ConfigError as error:
        faults.append(str(error))
        return None
    if not builder.faults and hasattr(config, "actor"):
        try:
            apply_recipe(config, set(written_keys(resolved)))
        except ConfigError as error:
            builder.fault(("actor", "recipe"), str(error))
    if not builder.faults:
        for path, message in [*faults_of(config), *_missing(kind, config), *_pointless(config)]:
            builder.fault(path, message)
    faults.extend(builder.faults)
    return Stage(name=str(name), kind=kind, config=config, index=index, source=document.file, origins=origins)


def _relative(override: Override, place: KeyPath, name: Any) -> Override | None:
    """An override of this stage with its path inside the stage; None where it is another stage's."""
    if len(override.path) < 3 or not place or override.path[1] not in (place[1], name):
        return None
    return dataclasses.replace(override, path=override.path[2:])


#: What a stage of each kind cannot run without, and what it is.
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
        "path": "the model to evaluate",
        "dataset.path": "the tasks to evaluate on",
        "workflow": "the code of an episode, such as rollwright.workflows.rlvr.RLVRWorkflow",
    },
}


def _missing(kind: str, config: Any) -> list[tuple[KeyPath, str]]:
    """Keys that the stage cannot run without, and that are empty."""
    needed = dict(_NEEDED[kind])
    if kind == "rl" and (config.tasksets or config.mode != "both"):
        del needed["train_dataset.path"], needed["workflow"]  # tasksets bring both; other modes say what they need
    paths = [tuple(key.split(".")) for key in needed]
    values = [functools.reduce(getattr, path, config) for path in paths]
    return [
        (path, f"is not set: {what}") for path, what, value in zip(paths, needed.values(), values, strict=True) if not value
    ]


def _pointless(config: Any) -> list[tuple[KeyPath, str]]:
    if isinstance(config, EvalConfig) and not config.greedy and not config.samples:
        return [(("samples",), "is 0 and greedy is false, so nothing would be evaluated; set one of them")]
    return []


def _refuse_repeated_names(stages: Sequence[Stage | None], document: Document, faults: list[str]) -> None:
    first: dict[str, int] = {}
    for stage in stages:
        if stage is None:
            continue
        if stage.name in first:
            line = document.lines.get(("stages", stage.index), 1)
            faults.append(
                f"{document.file}:{line}: stages.{stage.index}: the name {stage.name!r} is taken by stage {first[stage.name]}; "
                "give each stage a name of its own."
            )
        first.setdefault(stage.name, stage.index)


def _refuse_unused_keys(
    document: Document,
    overrides: Sequence[Override],
    shared: Sequence[Override],
    listed: Sequence[dict[str, Any] | None],
    faults: list[str],
) -> None:
    """A shared key that no stage has would be decoration."""
    if listed == [None]:
        return
    classes = [STAGE_CLASSES[stage["kind"]] for stage in listed if stage and stage.get("kind") in STAGE_CLASSES]
    if len(classes) < len(listed):
        return  # a stage of unknown kind is told already, and might have the key
    known = {name for cls in classes for name in [*(field.name for field in dataclasses.fields(cls)), *names_besides(cls)]}
    origins = Origins(document, list(overrides))
    given = [*(key for key in document.data if key != "stages"), *(str(override.path[0]) for override in shared)]
    for key in dict.fromkeys(given):
        if key not in known:
            faults.append(f"{origins.of((key,))}: {key}: no stage of this file has such a key; {nearest(key, known)}")
