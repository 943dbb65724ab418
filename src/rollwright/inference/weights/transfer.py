"""How new weights are transferred to engines: in memory, through shared memory or disk, or over a distributed group."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rollwright.config.allocation import AllocationMode
from rollwright.errors import WeightUpdateError
from rollwright.experience.packed import TYPE_NAMES
from rollwright.inference.weights.files import write_weights
from rollwright.inference.weights.group import BUCKET_BYTES, DEFAULT_GROUP
from rollwright.inference.weights.stream import WeightStream
from rollwright.tracking.logging import getLogger

logger = getLogger("Weights")

#: Directory in memory in which shared weights are mapped.
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_PREFIX = "rollwright-weights-"


@dataclass(frozen=True)
class WeightUpdateMeta:
    """How to transfer weights to the engines. Create one with the class methods.

    Attributes:
        type: ``memory`` (an engine in this process copies them), ``shared`` (memory mapped by both processes of one host),
            ``disk`` (safetensors in a directory that both can access) or ``xccl`` (broadcast in a distributed group).
        path: directory for ``disk`` or ``shared``. If None, ``shared`` chooses one.
        allocation: sizes of the engines, for ``xccl``.
        backend: for ``xccl``: gloo, nccl, or auto (nccl if the servers and the trainer are on GPUs).
        keep: number of versions to keep on disk; a server that comes back loads the newest.
        group: name of the distributed group.
        bucket_bytes: largest size of a bucket.
    """

    type: Literal["memory", "shared", "disk", "xccl"]
    path: str | None = None
    allocation: AllocationMode | None = None
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    keep: int = 2
    group: str = DEFAULT_GROUP
    bucket_bytes: int = BUCKET_BYTES

    @classmethod
    def memory(cls) -> WeightUpdateMeta:
        """Let an engine in this process copy the tensors."""
        return cls("memory")

    @classmethod
    def shared(cls, path: str | Path | None = None) -> WeightUpdateMeta:
        """Let servers on this host read a file that is mapped in memory and written in place.

        Args:
            path: directory of the file. None chooses one that the servers may read, in shared memory if available.
        """
        return cls("shared", path=None if path is None else str(path))

    @classmethod
    def from_disk(cls, path: str | Path, keep: int = 2) -> WeightUpdateMeta:
        """Let servers read safetensors from ``path/v<version>``.

        Args:
            path: a directory that every server can access under the same name; ``rollwright serve-model`` reads only below its
                ``--weights-root``.
            keep: number of versions to keep.
        """
        return cls("disk", path=str(path), keep=keep)

    @classmethod
    def from_fsdp_xccl(
        cls, allocation: AllocationMode | str, backend: Literal["auto", "gloo", "nccl"] = "auto"
    ) -> WeightUpdateMeta:
        """Broadcast from the trainer's first rank to the servers, bucket by bucket.

        Args:
            allocation: for example ``AllocationMode.from_str("sglang:d1p1t1+d1p1t1")``, or just the engine's part,
                ``"sglang:d1p1t1"``.
            backend: NCCL needs GPUs on both sides; Gloo works on CPUs.
        """
        if isinstance(allocation, str):
            allocation = AllocationMode.from_str(allocation)
        return cls("xccl", allocation=allocation, backend=backend)


class MappedWeights:
    """A directory of safetensors files whose tensors are mapped in this process and written in place, version after version.

    A reader maps the same files, so handing weights over costs one copy on each side and no allocation, whatever their size.
    """

    def __init__(self, directory: Path) -> None:
        """Args:
        directory: created here; ``close`` removes it.
        """
        self.directory = directory
        self._remove = weakref.finalize(self, _remove, directory, os.getpid())  # also if the process ends first
        self._mapped: dict[str, Tensor] = {}

    def write(self, weights: WeightStream, version: int, config: Any = None) -> None:
        """Write tensors to the files, one at a time. Names, types and shapes must be the same every time.

        Raises:
            WeightUpdateError: the weights have changed their names, types or shapes, or do not fit.
        """
        if not self._mapped:
            write_weights(self.directory, weights, version, config, digested=False)
            self._mapped = {
                name: tensor for path in self.directory.glob("*.safetensors") for name, tensor in _map(path).items()
            }
            return
        if {name: (given.dtype, given.shape) for name, given in weights.described} != {
            name: (held.dtype, held.shape) for name, held in self._mapped.items()
        }:
            raise WeightUpdateError(
                "The weights have other names, types or shapes than those that were shared first; make a new WeightUpdateMeta."
            )
        for name, tensor in weights:
            self._mapped[name].copy_(tensor)

    def close(self) -> None:
        """Unmap and remove the files."""
        self._mapped.clear()
        self._remove()


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the process that shares the weights
    shutil.rmtree(directory, ignore_errors=True)
    if directory.parent.name.startswith(_SHARED_PREFIX):
        with contextlib.suppress(OSError):
            directory.parent.rmdir()


def _map(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    memory = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    mapped: dict[str, Tensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        mapped[name] = memory[start:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])
    return mapped


_DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}


def shared_directory(roots: Iterable[str | Path] = ()) -> Path:
    """Create a directory for shared weights.

    Args:
        roots: directories that the servers may read. If there are none, the servers may read every directory.

    Raises:
        WeightUpdateError: none of the roots exists on this host.
    """
    roots = [Path(root) for root in roots]
    present = [root for root in roots if root.is_dir()]
    if roots and not present:
        raise WeightUpdateError(
            f"The servers read weights only below {', '.join(map(str, roots))}, which are not on this host. Publish by xccl, or "
            "by disk on a file system that both see."
        )
    parent = min(present, key=lambda root: not root.is_relative_to(_SHARED_MEMORY), default=None)
    if parent is None:
        parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return Path(tempfile.mkdtemp(prefix=_SHARED_PREFIX, dir=parent)) / "current"
