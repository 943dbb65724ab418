"""Weights as files: safetensors that are written atomically, with a digest of their content."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollwright.atomic import replaced_directory
from rollwright.errors import ConfigError, WeightUpdateError
from rollwright.experience.packed import safetensors_head
from rollwright.inference.weights.adapter import CONFIG_FILE, WEIGHTS_FILE, AdapterSpec, is_adapter
from rollwright.inference.weights.group import buckets
from rollwright.inference.weights.stream import WeightStream

#: File that describes a directory of weights: ``{"version", "digest"}``.
MANIFEST = "rollwright_weights.json"
_FILE_BYTES = 4 << 30


def content_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Compute SHA-256 over the ``content_digests`` of tensors, sorted by name.

    Two sets of weights have the same digest exactly if they are equal bit for bit, however they are stored.
    """
    return total_digest({name: _tensor_digest(name, tensor) for name, tensor in named})


def content_digests(named: Iterable[tuple[str, Tensor]]) -> dict[str, bytes]:
    """Compute SHA-256 over the name, type, shape and bytes of each tensor, by name."""
    return {name: _tensor_digest(name, tensor) for name, tensor in named}


def total_digest(digests: Mapping[str, bytes]) -> str:
    """Compute ``content_digest`` from the digests of the tensors."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def _tensor_digest(name: str, tensor: Tensor) -> bytes:
    digest = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    digest.update(_content(tensor))
    return digest.digest()


def _content(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")  # type: ignore[arg-type]


def write_weights(
    directory: str | Path,
    named: WeightStream | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    version: int,
    config: Any = None,
    *,
    digested: bool = True,
) -> str | None:
    """Write weights one tensor at a time. Readers never see incomplete weights.

    The weights are written to a draft beside ``directory``; the complete draft then replaces ``directory``.

    Args:
        directory: target directory.
        named: parameter names and whole tensors; each tensor occurs once, including tied ones.
        version: version of these weights.
        config: a Hugging Face config, saved as well so that the result is a model directory.
        digested: compute the digest of the content, which takes a second or two for each GB.

    Returns:
        Digest of the content; None without ``digested``.

    Raises:
        WeightUpdateError: the disk is full, too small for these weights, or cannot be written.
    """
    directory = Path(directory)
    try:
        weights = WeightStream.of(named)
        with replaced_directory(directory, durable=False) as draft:
            _require_space(draft, weights.nbytes)
            digest = write_files(draft, weights, digested=digested)
            if config is not None:
                config.save_pretrained(draft)
            (draft / MANIFEST).write_text(json.dumps({"version": version} | ({"digest": digest} if digested else {})))
    except OSError as error:
        raise WeightUpdateError(
            f"Weights cannot be written to {directory}: {error}. Free space or choose another path."
        ) from error
    return digest


def _require_space(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise OSError(f"they take {nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there")


def write_files(directory: Path, weights: WeightStream, *, digested: bool = True) -> str | None:
    """Write ``model.safetensors``, or files of at most 4 GiB and their index, with one tensor in memory at a time.

    An adapter is written as a PEFT directory: ``adapter_model.safetensors`` and ``adapter_config.json``.

    Returns:
        Digest of the content; None without ``digested``.

    Raises:
        WeightUpdateError: there is nothing to write, or a name occurs twice.
    """
    names = [name for name, _ in weights.described]
    if not names:
        raise WeightUpdateError("There are no weights to write.")
    if twice := {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else None:
        raise WeightUpdateError(f"Weight {min(twice)} is given twice.")
    parts = list(buckets(weights.described, _FILE_BYTES if weights.adapter is None else max(1, weights.nbytes)))
    whole = "model.safetensors" if weights.adapter is None else WEIGHTS_FILE
    if weights.adapter is not None:
        (directory / CONFIG_FILE).write_text(json.dumps(weights.adapter.to_peft(), indent=2), encoding="utf-8")
    try:
        heads = [safetensors_head(part, {"format": "pt"}) for part in parts]
    except TypeError as error:
        raise WeightUpdateError(f"Weight {error} that files of weights hold.") from None
    digests: dict[str, bytes] = {}
    index: dict[str, Any] = {"metadata": {"total_size": weights.nbytes}, "weight_map": {}}
    tensors = iter(weights)
    for number, (part, head) in enumerate(zip(parts, heads, strict=True), 1):
        file = whole if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        with (directory / file).open("wb") as out:
            out.write(head)
            for name, described in part:
                given, tensor = next(tensors)
                if (given, tensor.dtype, tensor.shape) != (name, described.dtype, described.shape):
                    raise WeightUpdateError(
                        f"Weight {given} came where {name} of {described.dtype} {list(described.shape)} was announced."
                    )
                tensor = tensor.detach().to("cpu")  # copied once, for both the digest and the file
                if digested:
                    digests[name] = _tensor_digest(name, tensor)
                out.write(_content(tensor))
                index["weight_map"][name] = file
                del tensor
    if len(parts) > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total_digest(digests) if digested else None


def read_weights(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of a directory's safetensors files one by one from mapped memory.

    Raises:
        WeightUpdateError: there are no such files, or one is damaged.
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


def read_stream(directory: str | Path) -> WeightStream:
    """Read a directory that ``write_weights`` or PEFT wrote, as a stream that knows whether it is an adapter. All tensors are held.

    Raises:
        WeightUpdateError: there are no such files, or one is damaged.
        ConfigError: the adapter is of a kind that cannot be loaded.
    """
    described = Path(directory) / CONFIG_FILE
    adapter = None
    if described.is_file():
        try:
            adapter = AdapterSpec.from_peft(json.loads(described.read_text(encoding="utf-8")))
        except (ValueError, KeyError) as error:
            raise WeightUpdateError(f"{described} cannot be read as an adapter's description: {error!r}.") from error
    return WeightStream.of(dict(read_weights(directory)), adapter)


def base_and_adapter(path: str | Path) -> tuple[str, WeightStream | None]:
    """Return the model at ``path`` and None or, if only an adapter is there, the model that its description names and the adapter.

    Raises:
        ConfigError: the description names no base.
    """
    directory = Path(path)
    if not is_adapter(directory):
        return str(path), None
    stream = read_stream(directory)
    assert stream.adapter is not None
    if not stream.adapter.base:
        raise ConfigError(
            f"{directory / CONFIG_FILE} has no base_model_name_or_path: write the base model's path or name there."
        )
    return stream.adapter.base, stream


def checkpoint_names(directory: str | Path | None) -> frozenset[str] | None:
    """Read a checkpoint's weight names. Returns None if the checkpoint is unknown, not on this machine, or was published by a trainer."""
    if directory is None:
        return None
    directory = Path(directory)
    paths = sorted(directory.glob("*.safetensors"))
    if not paths or (directory / MANIFEST).exists():
        return None
    names: set[str] = set()
    try:
        for path in paths:
            with safe_open(path, framework="pt") as file:
                names.update(file.keys())
    except (SafetensorError, OSError):  # a server may be able to read a directory that this process cannot
        return None
    return frozenset(names)


def keep_newest(parent: Path, prefix: str, count: int) -> None:
    """Remove all but the ``count`` directories with the highest numbers after ``prefix``."""
    for _, path in numbered(parent, prefix)[:-count]:
        shutil.rmtree(path, ignore_errors=True)


def remove_later(parent: Path, prefix: str, number: int) -> None:
    """Remove the directories with numbers above ``number`` after ``prefix``."""
    for later, path in numbered(parent, prefix):
        if later > number:
            shutil.rmtree(path, ignore_errors=True)


def numbered(parent: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return the numbers after ``prefix`` and the paths that have one, in order of the numbers."""
    numbers = ((path.name.removeprefix(prefix), path) for path in parent.glob(f"{prefix}*"))
    return sorted((int(number), path) for number, path in numbers if number.isdigit())
