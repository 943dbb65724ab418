"""Hugging Face checkpoints. Each rank loads its own shards of the weights, and a model is saved one tensor at a time."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from rollwright.atomic import replaced_directory
from rollwright.errors import ConfigError, LostRankError
from rollwright.experience.packed import TYPE_NAMES
from rollwright.inference.weights.files import write_files
from rollwright.inference.weights.names import CheckpointKeys, as_published
from rollwright.inference.weights.stream import WeightStream
from rollwright.tracking.progress import without_progress_bars
from rollwright.training import parallel
from rollwright.training.fsdp import call_checkpoint, own_tensors, whole_weights
from rollwright.training.parallel import sharded_from

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
    with parallel.watched():
        filled.update(_load_converted(keys, place, own, by_name))
    keys.remember()
    if missing := sorted(own.keys() - filled):
        raise ConfigError(
            f"{path} has no weights for {len(missing)} tensors of the model, such as {missing[0]}: it belongs to another architecture or is "
            "incomplete."
        )


def _load_converted(
    keys: CheckpointKeys, place: dict[str, Any], own: dict[str, Tensor], by_name: dict[str, str]
) -> Iterator[str]:
    """Load the tensors that transformers merges from several ones or splits from one, such as experts. Collective.

    Each tensor of the checkpoint is read by one rank, which sends the others their shards, and all ranks read about as many bytes. (If
    copies are replicated, the first rank reads all of them.) The others make the same conversion with tensors on the meta device, which tells
    them names, shapes and types.

    Yields:
        The name of each loaded tensor in ``own``.
    """
    sizes = {name: sum(_shape_of(place[key], key).nbytes for key, *_ in parts) for name, parts in keys.converted.items()}
    readers = 1 if any(map(parallel.is_replicated, own.values())) else parallel.world_size()
    bytes_of = dict.fromkeys(range(readers), 0)
    for converted in sorted(keys.converted, key=lambda name: -sizes[name]):
        source = min(bytes_of, key=bytes_of.__getitem__)
        bytes_of[source] += sizes[converted]
        read = _shape_of if source != parallel.rank() else _tensor_of
        for name, tensor in keys.convert(converted, lambda key, read=read: read(place[key], key)):
            target = own[by_name[name]]
            target.copy_(sharded_from(tensor.to(target.dtype), target, source))
            yield by_name[name]


def _tensor_of(file: Any, key: str) -> Tensor:
    return file.get_tensor(key)


def _shape_of(file: Any, key: str) -> Tensor:
    part = file.get_slice(key)
    kind = next((kind for kind, name in TYPE_NAMES.items() if name == part.get_dtype()), None)
    return file.get_tensor(key).to("meta") if kind is None else torch.empty(part.get_shape(), dtype=kind, device="meta")


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
        write_files(draft, as_published(model, weights), digested=False)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        if image_processor is not None:
            image_processor.save_pretrained(draft)


# -- critics -----------------------------------------------------------------------------------------------------------

#: The ends of the names of transformers' classes whose output layer is named ``HEAD``.
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
HEAD = "score.weight"


def classifier_of(model: Any) -> type | None:
    """Return transformers' class for sequence classification over the trunk of a causal model, or None if there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    kinds: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    kind = kinds.get(type(model.config), None)
    return kind if kind is not None and kind.base_model_prefix == model.base_model_prefix else None


def save_classifier(model: Any, directory: str | Path, weights: WeightStream, head: str, tokenizer: Any = None) -> None:
    """Write a causal model whose output layer has one row as a model for sequence classification with one label.

    Args:
        model: the model.
        directory: target directory; replaced if it exists.
        weights: its tensors under its own names.
        head: name of its output layer's weight.
        tokenizer: tokenizer to write, too. If None, no tokenizer is written.

    Raises:
        ConfigError: transformers has no such class for the architecture.
    """
    if (kind := classifier_of(model)) is None:
        raise ConfigError(f"transformers has no model for sequence classification of the type {model.config.model_type!r}.")
    config = copy.deepcopy(model.config)
    config.num_labels, config.architectures = 1, [kind.__name__]
    if config.pad_token_id is None:  # to score padded sequences
        config.pad_token_id = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    with replaced_directory(directory) as draft:
        config.save_pretrained(draft)
        write_files(draft, as_published(model, weights).renamed({head: HEAD}), digested=False)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)


def read_tensor(path: str, name: str) -> Tensor | None:
    """Return a tensor of a checkpoint in safetensors files; None if it has none of this name. Every rank has to call this."""
    for file in _weight_files(path):
        with safe_open(file, framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                return opened.get_tensor(name)
    return None
