"""Weights as files: safetensors written beside and renamed, with a digest of their content."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollwright.atomic import replaced_directory
from rollwright.errors import WeightUpdateError
from rollwright.inference.weights.group import buckets

#: Says what a directory of weights holds: ``{"version", "digest"}``.
MANIFEST = "rollwright_weights.json"
_FILE_BYTES = 4 << 30


def content_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, types, shapes and bytes of tensors, in the order of their names' sort.

    Two sets of weights have one digest exactly where they are equal bit for bit, however they were stored.
    """
    return _total_digest({name: _tensor_digest(name, tensor) for name, tensor in named})


def _total_digest(digests: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def _tensor_digest(name: str, tensor: Tensor) -> bytes:
    digest = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel():
        digest.update(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.digest()


def write_weights(directory: str | Path, named: Iterable[tuple[str, Tensor]], version: int, config: Any = None) -> str:
    """Write weights so that no reader ever sees half of them.

    They are written to a directory beside ``directory``, which is then renamed; one that is there already is replaced.

    Args:
        directory: where they are to be found.
        named: parameter names and whole tensors, each once; tied weights once.
        version: of these weights.
        config: a Hugging Face config, saved beside them so that the directory is a model directory.

    Returns:
        The content's digest.

    Raises:
        WeightUpdateError: the disk is full or cannot be written.
    """
    directory = Path(directory)
    try:
        with replaced_directory(directory, durable=False) as draft:
            digest = _write_files(draft, named)
            if config is not None:
                config.save_pretrained(draft)
            (draft / MANIFEST).write_text(json.dumps({"version": version, "digest": digest}))
    except OSError as error:
        raise WeightUpdateError(
            f"Weights cannot be written to {directory}: {error}. Free space or choose another path."
        ) from error
    return digest


def _write_files(directory: Path, named: Iterable[tuple[str, Tensor]]) -> str:
    """Write shards of at most 4 GiB and their index; returns the digest of all."""
    number, file, digests = 0, "", dict[str, bytes]()
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
    for number, shard in enumerate(buckets(named, _FILE_BYTES), 1):
        file = f"model-{number:05d}.safetensors"
        for place, (name, tensor) in enumerate(shard):
            if name in digests:
                raise WeightUpdateError(f"Weight {name} is given twice.")
            tensor = tensor.detach().to("cpu").contiguous()
            digests[name] = _tensor_digest(name, tensor)
            shard[place] = name, tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
            index["weight_map"][name] = file
            index["metadata"]["total_size"] += tensor.nbytes
        save_file(dict(shard), directory / file, metadata={"format": "pt"})
    if not digests:
        raise WeightUpdateError("There are no weights to write.")
    if number == 1:
        (directory / file).rename(directory / "model.safetensors")
    else:
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return _total_digest(digests)


def read_weights(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a directory's safetensors files, read one by one from mapped memory.

    Raises:
        WeightUpdateError: there is no such file, or one is damaged.
    """
    paths = sorted(Path(directory).glob("*.safetensors"))
    if not paths:
        raise WeightUpdateError(f"There are no *.safetensors in {directory}; write weights with write_weights.")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightUpdateError(f"{path} cannot be read as safetensors ({error}); publish the weights again.") from error


def keep_newest(parent: Path, prefix: str, count: int) -> None:
    """Remove all but the ``count`` directories with the highest numbers after ``prefix``."""
    for _, path in _numbered(parent, prefix)[:-count]:
        shutil.rmtree(path, ignore_errors=True)


def remove_later(parent: Path, prefix: str, number: int) -> None:
    """Remove the directories with numbers above ``number`` after ``prefix``."""
    for later, path in _numbered(parent, prefix):
        if later > number:
            shutil.rmtree(path, ignore_errors=True)


def _numbered(parent: Path, prefix: str) -> list[tuple[int, Path]]:
    numbers = ((path.name.removeprefix(prefix), path) for path in parent.glob(f"{prefix}*"))
    return sorted((int(number), path) for number, path in numbers if number.isdigit())
