"""Checks for inputs of a run that are missing or cannot be read: models, tokenizers and datasets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollwright.config.experiment import DPOConfig, EvalConfig, NewModelConfig, PPOConfig, RunConfig, SFTConfig
from rollwright.config.faults import Fault, Look, Rule, found_or_fault, refuse_faults
from rollwright.config.loading import Stage
from rollwright.config.servers import is_endpoint
from rollwright.config.source import KeyPath
from rollwright.config.tasksets import DatasetConfig
from rollwright.data.datasets import get_dataset
from rollwright.data.rows import names_a_file
from rollwright.data.selectors import taskset_rows
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import RollwrightError
from rollwright.inference.weights.adapter import is_adapter

#: Sections whose models are only sampled with, and may be adapters over a base that they name.
_MAY_BE_ADAPTERS = ("path", "bench")


def refuse_missing_inputs(stages: Sequence[Stage]) -> None:
    """Read every dataset, and look up every model and tokenizer, except those that an earlier stage makes.

    Names on the Hugging Face Hub are looked up there, which downloads configurations, tokenizers and datasets, but no weights.

    Raises:
        ConfigError: lists everything that is missing or cannot be read, with its key, file and line.
    """
    refuse_faults(stages, INPUTS)


def refuse_missing_files(stages: Sequence[Stage]) -> None:
    """Check that models and datasets at local paths exist. Reads no dataset and does not use the network.

    Raises:
        ConfigError: lists everything that is missing and that no earlier stage makes, with its key, file and line.
    """
    refuse_faults(stages, FILES)


def _has_to_exist(path: str, look: Look) -> bool:
    """Return False if a path is empty, or below the directory that an earlier stage writes."""
    made = (_output_of(config) for config in look.earlier)
    return bool(path) and not any(Path(path).absolute().is_relative_to(each) for each in made)


def _output_of(config: Any) -> Path:
    """Return the directory that a stage writes."""
    if isinstance(config, NewModelConfig):
        return Path(config.path).absolute()
    return (Path(config.cluster.fileroot) / config.experiment_name / config.trial_name).absolute()


def _missing_models(look: Look) -> Iterator[Fault]:
    for key, path, needs_weights in _models(look.section):
        if key[0] == "rollout" or not _has_to_exist(path, look) or (key[0] in _MAY_BE_ADAPTERS and is_adapter(path)):
            continue
        if fault := _local_model_fault(path, needs_weights):
            yield key, fault  # rollout.path may be on another machine


def _missing_datasets(look: Look) -> Iterator[Fault]:
    for key, section, _ in _datasets(look.section):
        is_file = section.kind is None and names_a_file(section.path) and _has_to_exist(section.path, look)
        if is_file and not Path(section.path).expanduser().exists():
            yield (*key, "path"), f"is {section.path}, and there is no such file or directory (looked from {Path.cwd()})"


def _unusable_models(look: Look) -> Iterator[Fault]:
    for key, path, needs_weights in _models(look.section):
        may_be_adapter = key[0] in _MAY_BE_ADAPTERS and is_adapter(path)
        if _has_to_exist(path, look) and not may_be_adapter and (fault := _model_fault(path, needs_weights)):
            yield key, fault


def _unreadable_datasets(look: Look) -> Iterator[Fault]:
    """Report tokenizers that cannot be loaded, datasets that cannot be read with them, and batches of impossible size."""
    config, tokenizer = look.section, None
    for key, path in _tokenizers(config):
        if _has_to_exist(path, look):
            trusted = getattr(config, "trust_remote_code", False)
            tokenizer = yield from found_or_fault(key, lambda path=path, trusted=trusted: load_tokenizer(path, trusted))
    for key, section, read in _datasets(config):
        if _has_to_exist(section.path, look):
            try:
                rows = read(dataclasses.replace(section, max_length=section.max_length if tokenizer else None), tokenizer)
            except Exception as error:  # a user's builder can fail in any way
                kind = "" if isinstance(error, RollwrightError) else f"{type(error).__name__}: "
                yield (*key, "path"), f"cannot be read: {kind}{error}"
            else:
                yield from ((key + below, message) for below, message in _batch_faults(config, section, key, len(rows)))


def _models(config: Any) -> Iterator[tuple[KeyPath, str, bool]]:
    """Yield the key and path of each model, and whether the model needs weights."""
    if isinstance(config, PPOConfig):
        yield ("actor", "path"), config.actor.path, not config.actor.init_from_scratch
        yield ("rollout", "path"), config.rollout.path, True
        for index, auxiliary in enumerate(config.auxiliary_models):
            yield ("auxiliary_models", index, "model_path"), auxiliary.model_path, True
        for index, teacher in enumerate(config.teachers):
            yield ("teachers", index, "path"), teacher.path, True
        for index, path in enumerate(config.bench.checkpoints if config.mode == "bench" else []):
            yield ("bench", "checkpoints", index), path, True
    if isinstance(config, SFTConfig):
        yield ("model", "path"), config.model.path, not config.model.init_from_scratch
        for index, teacher in enumerate(config.teachers):
            yield ("teachers", index, "path"), teacher.path, True
    if isinstance(config, PPOConfig | DPOConfig) and config.ref is not None:
        yield ("ref", "path"), config.ref.path, True
    if isinstance(config, EvalConfig) and not is_endpoint(config.path):
        yield ("path",), config.path, True


def _tokenizers(config: Any) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(config, NewModelConfig):
        yield ("vocabulary_from",), config.vocabulary_from
    elif config.tokenizer_path:
        yield ("tokenizer_path",), config.tokenizer_path
    else:
        yield from ((key, path) for key, path, _ in list(_models(config))[:1] if _model_fault(path, False) is None)


def _local_model_fault(path: str, needs_weights: bool) -> str | None:
    """Return why a local path has no usable model, or None if it has one or the path is a name on the Hugging Face Hub."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        if is_adapter(directory):
            return f"is {path}, a LoRA adapter without its base; merge the two: rollwright export {path} DIRECTORY"
        if not (directory / "config.json").is_file():
            held = "holds no model" if any(directory.iterdir()) else "is empty"
            return f"is {path}, a directory that {held}: it has no config.json"
        if needs_weights and not any(directory.glob("*.safetensors")) and not any(directory.glob("*.bin")):
            return f"is {path}, which has a configuration and no weights (*.safetensors)"
    elif path.startswith((".", "/", "~")) or path.count("/") > 1:
        return f"is {path}, and there is no such directory (looked from {Path.cwd()})"
    return None


def _model_fault(path: str, needs_weights: bool) -> str | None:
    """Return why a model cannot be used, or None if it can."""
    fault = _local_model_fault(path, needs_weights)
    if fault or Path(path).expanduser().is_dir():
        return fault
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        if "trust_remote_code" not in str(error):
            cause = " ".join(str(error).split())[:200]
            return f"is {path}, which is neither a directory (looked from {Path.cwd()}) nor a model at Hugging Face: {cause}"
    return None


def _datasets(config: Any) -> Iterator[tuple[KeyPath, DatasetConfig, Callable[[DatasetConfig, Any], Sequence[Any]]]]:
    """Yield the key and section of each dataset, and the function that reads it."""
    names: list[str] = []
    if isinstance(config, NewModelConfig) and config.bpe is not None:
        yield ("bpe", "dataset"), config.bpe.dataset, get_dataset
    elif isinstance(config, EvalConfig):
        names = ["dataset"]
    elif isinstance(config, SFTConfig):
        names = ["train_dataset", "valid_dataset"]
    elif isinstance(config, PPOConfig):
        trains, evaluates = config.mode in ("both", "explore"), config.mode in ("both", "explore", "bench")
        names = [*(["train_dataset"] if trains and not config.tasksets else []), *(["valid_dataset"] if evaluates else [])]
        for name in [*(["tasksets"] if trains else []), *(["eval_tasksets"] if evaluates else [])]:
            for index, taskset in enumerate(getattr(config, name)):
                yield (name, index), taskset, lambda section, _: taskset_rows(section)
    yield from (((name,), section, get_dataset) for name in names if (section := getattr(config, name)) is not None)


def _batch_faults(config: RunConfig, section: DatasetConfig, key: KeyPath, rows: int) -> Iterator[Fault]:
    """Report batches that can never be full, or that are too small to be divided into minibatches."""
    size, rest = section.batch_size, rows % section.batch_size
    if key != ("train_dataset",):
        return
    if section.drop_last and rows < size:
        yield (
            ("batch_size",),
            f"is {size}, but there are {rows} tasks, so no batch would ever be full; lower it, or set drop_last: false",
        )
    elif not section.drop_last and isinstance(config, PPOConfig) and 0 < rest < config.actor.ppo_n_minibatches:
        parts = config.actor.ppo_n_minibatches
        yield (
            ("drop_last",),
            f"is false, and the last batch of {rest} tasks cannot be divided into actor.ppo_n_minibatches ({parts})",
        )


_STAGES = NewModelConfig | RunConfig
#: Local files that a run needs.
FILES = (Rule(_STAGES, ("",), _missing_models), Rule(_STAGES, ("",), _missing_datasets))
#: Everything that a run needs, read as the run would.
INPUTS = (Rule(_STAGES, ("",), _unusable_models), Rule(_STAGES, ("",), _unreadable_datasets))
