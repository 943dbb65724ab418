"""A run of several stages in one file: make a model, warm it up, train it, evaluate it.

A file has shared keys at its top level and a list ``stages:``. Each stage has a ``kind``, a ``name`` and keys of its own, which
are merged over the shared ones. A shared key reaches the stages whose config has it; one that reaches none is refused, as
is an unknown key of a stage. A file without ``stages`` is one stage of the ``kind`` it names (``rl`` unless it does).

What the command line says wins over the file: ``key=value`` in every stage that has the key, ``stages.NAME.key=value`` in
that stage alone.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollwright.config.building import Builder, names_besides, nearest
from rollwright.config.checks import faults_of
from rollwright.config.evaluation import EvalConfig
from rollwright.config.experiment import BaseExperimentConfig, DPOConfig, GRPOConfig, SFTConfig
from rollwright.config.loading import config_to_dict, merge_overrides, written_keys
from rollwright.config.new_model import NewModelConfig
from rollwright.config.recipes import apply_recipe
from rollwright.config.resolving import merge, resolve
from rollwright.config.source import Document, KeyPath, Origins, Override, dotted, parse_override, read_yaml
from rollwright.config.trinity import is_trinity_shaped, translate
from rollwright.errors import ConfigError

logger = logging.getLogger("rollwright.config")


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
    document, parsed = read_yaml(file), [parse_override(text) for text in overrides]
    if is_trinity_shaped(document.data):
        document, parsed = _translated(document, parsed)
    return build_stages(document, parsed)


def _translated(document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
    """A Trinity-shaped file in the project's own shape; overrides may be written in either."""
    ours = {field.name for field in dataclasses.fields(GRPOConfig)} - set(document.data) - {"mode", "cluster"}
    theirs = [override for override in overrides if override.path[0] not in ours]
    origins = Origins(document, theirs)
    translation = translate(resolve(merge_overrides(document.data, theirs), [], origins), document, theirs)
    logger.info("%s has Trinity-RFT's shape; it is read as this project's config:", document.file)
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
