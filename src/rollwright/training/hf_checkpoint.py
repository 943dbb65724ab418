"""Hugging Face checkpoints. Each rank loads its own shards of the weights, and a model is saved one tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from rollwright.atomic import replaced_directory
from rollwright.errors import ConfigError, LostRankError
from rollwright.inference.weights.files import write_files
from rollwright.inference.weights.names import CheckpointKeys, as_published
from rollwright.inference.weights.stream import WeightStream
from rollwright.tracking.progress import without_progress_bars
from rollwright.training import parallel
from rollwright.training.fsdp import call_checkpoint, own_tensors, whole_weights
from rollwright.training.parallel import sharded_like

_INDEX = "model.safetensors.index.json"


@torch.no_grad()
def load_weights(model: Any, path: str) -> None:
    """Load a model's parameters from a checkpoint. Collective.

    Args:
        model: a Hugging Face model whose parameters are allocated, sharded or not.
        path: a model directory, or a name on the Hugging Face Hub.

    Raises:
        ConfigError: there is no checkpoint in safetensors files, or it belongs to another model.
        LostRankError: another rank has ended.
    """
    files = _weight_files(path)
    own = own_tensors(model)
    by_name = _names_of_same(model)
    opened = [safe_open(file, framework="pt") for file in files]
    place = {key: file for file in opened for key in file.keys()}  # noqa: SIM118
    keys = CheckpointKeys.of(model, list(place))
    targets = {key: own[by_name[name]] for key, name in keys.direct.items() if name in by_name}
    filled = {by_name[name] for name in keys.direct.values() if name in by_name}
    try:
        if targets:
            reader = HuggingFaceStorageReader(str(files[0].parent))
            reader.fs = _Files(files)
            with parallel.watched():
                call_checkpoint(load, targets, storage_reader=reader, process_group=parallel.checkpoint_group())
    except LostRankError:  # the files are not the cause
        raise
    except (Exception, CheckpointException) as error:  # the message names the cause
        raise ConfigError(f"{path} could not be read into a model of type {model.config.model_type!r}: {error}") from error
    for converted in keys.converted:  # merged from several tensors or split from one by transformers
        for name, tensor in keys.convert(converted, lambda key: place[key].get_tensor(key)):
            own[by_name[name]].copy_(sharded_like(tensor.to(own[by_name[name]].dtype), own[by_name[name]]))
            filled.add(by_name[name])
    keys.remember()
    if missing := sorted(own.keys() - filled):
        raise ConfigError(
            f"{path} has no weights for {len(missing)} tensors of the model, such as {missing[0]}: it belongs to another architecture or is "
            "incomplete."
        )


def _names_of_same(model: Any) -> dict[str, str]:
    """Map every name in the model's state to the name that ``own_tensors`` uses for it; tied tensors have several names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def _weight_files(path: str) -> list[Path]:
    """Return the checkpoint's safetensors files on this machine. Rank 0 downloads missing files first."""
    directory = Path(path)
    if not directory.is_dir():
        directory = Path(parallel.from_first_rank(lambda: _fetched(path)))
        if not directory.is_dir():  # another host downloads for itself
            directory = Path(_fetched(path))
    index = directory / _INDEX
    if index.is_file():
        return [directory / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{path} has no *.safetensors files, which a sharded model is loaded from; load it once and write it with save_pretrained."
        )
    return files


def _fetched(name: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=["*.safetensors", "*.json"])
    except (OSError, ValueError) as error:
        raise ConfigError(f"No model could be loaded from {name!r}: {error}") from error


class _Files(FileSystem):
    """A file system that lists only the files of a checkpoint, not other safetensors files in their directory."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def ls(self, path: Any) -> list[str]:
        return [str(file) for file in self._files]


def save_model(
    model: nn.Module,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    image_processor: Any = None,
    weights: WeightStream | None = None,
) -> None:
    """Write a model (and tokenizer) in the format of ``from_pretrained``. The directory appears atomically.

    If ``weights`` are an adapter, it is a PEFT directory with only the adapter.

    Args:
        model: a Hugging Face model.
        directory: target directory; replaced if it exists.
        tokenizer: tokenizer whose files and chat template are written too. If None, no tokenizer is written.
        image_processor: image processor whose file is written too. If None, no image processor is written.
        weights: tensors to write, under the model's own names, read one at a time. If None, the model's own parameters.
    """
    weights = whole_weights(model) if weights is None else weights
    with replaced_directory(directory) as draft, without_progress_bars():
        if weights.adapter is None:
            model.save_pretrained(draft, state_dict={})  # type: ignore[operator] - its configuration
            for path in draft.glob("*.safetensors"):
                path.unlink()
        write_files(draft, as_published(model, weights))
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        if image_processor is not None:
            image_processor.save_pretrained(draft)
