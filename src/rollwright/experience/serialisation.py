"""Tensors and JSON as one block of bytes: safetensors, whose metadata carry the JSON. Nothing is pickled."""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from rollwright.errors import TrajectoryError

FORMAT = "rollwright.experience"
VERSION = 1


#: Names of the types in the format (https://github.com/huggingface/safetensors#format).
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def pack_bytes(tensors: dict[str, torch.Tensor], rest: dict[str, Any]) -> bytes:
    """Named tensors and JSON values as bytes; the same values give the same bytes.

    The header is written here: ``safetensors.torch.save`` takes four times as long for tensors this small, and orders its
    metadata at random.

    Raises:
        TrajectoryError: ``rest`` holds what JSON cannot; the message names the path to it.
    """
    document = json.dumps(plain_json(rest, ""), separators=(",", ":"), allow_nan=True)
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "version": str(VERSION), "rest": document}}
    blocks, end = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):  # keeps every block aligned
        if tensor.dtype not in _DTYPES:
            raise TrajectoryError(f"{name}: tensors of type {tensor.dtype} cannot be stored; convert it.")
        block = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + len(block)]}
        blocks.append(block)
        end += len(block)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join((struct.pack("<Q", len(head)), head, *blocks))


def unpack_bytes(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What ``pack_bytes`` was given.

    Raises:
        TrajectoryError: the bytes are damaged, another format or a later version.
    """
    try:
        (size,) = struct.unpack_from("<Q", data)
        metadata = json.loads(bytes(data[8 : 8 + size])).get("__metadata__", {})
        if metadata.get("format") != FORMAT:
            raise TrajectoryError(f"the bytes are safetensors of format {metadata.get('format')!r}, not {FORMAT!r}.")
        if int(metadata["version"]) > VERSION:
            raise TrajectoryError(
                f"the bytes were written in version {metadata['version']} of the format; this installation reads up to {VERSION}: update it."
            )
        return load(bytes(data)), json.loads(metadata["rest"])
    except (struct.error, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise TrajectoryError(f"the bytes are no serialised experience ({error}); they are damaged or cut.") from error


def plain_json(value: Any, path: str) -> Any:
    """JSON's types out of plain values, numbers of NumPy and torch, tuples and sets."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TrajectoryError(f"{path or 'top level'}: key {key!r} is no string; JSON has only string keys.")
        return {key: plain_json(part, f"{path}.{key}" if path else key) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(part, f"{path}[{index}]") for index, part in enumerate(value)]
    if hasattr(value, "tolist"):  # numbers, arrays and tensors
        return plain_json(value.tolist(), path)
    raise TrajectoryError(f"{path}: {type(value).__name__} cannot be stored; use numbers, text, lists and dicts.")
