"""Recover checkpoints: everything that a run continues from, written whole or not at all, and read without pickle.

A state is a nested dict whose leaves are tensors or JSON values. Tensors go to ``state.safetensors``, the rest to
``state.json``; ``checksums.json`` has a checksum of each, so that damage is noticed and never loaded. The states of the random
generators are part of it.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollwright.atomic import replaced_directory
from rollwright.errors import CheckpointError
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel

logger = getLogger("checkpoint")

_TENSOR = "__tensor__"
_FORMAT = 2
_FILES = ("state.json", "state.safetensors")


def write_state(directory: str | Path, state: dict[str, Any], *, before_visible: Callable[[], object] | None = None) -> None:
    """Write a nested dict of tensors and JSON values; the directory appears whole or not at all, after ``before_visible()``."""
    tensors: dict[str, Tensor] = {}
    plain = _separate(state, "", tensors)
    with replaced_directory(directory, before_visible=before_visible) as draft:
        save_file(tensors, draft / "state.safetensors")
        (draft / "state.json").write_text(json.dumps({"format": _FORMAT, "state": plain}), encoding="utf-8")
        (draft / "checksums.json").write_text(json.dumps({name: _checksum(draft / name) for name in _FILES}))


def read_state(directory: str | Path) -> dict[str, Any]:
    """Read what ``write_state`` wrote; tensors are on the CPU.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is of another format.
    """
    directory = Path(directory)
    try:
        check_state(directory)
        plain = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        tensors = load_file(directory / "state.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{directory} holds no readable checkpoint ({error}); resume from another, or start anew."
        ) from error
    if not isinstance(plain, dict):
        raise CheckpointError(
            f"{directory}/state.json holds a {type(plain).__name__}, not a checkpoint's state; resume from another."
        )
    if plain.get("format") != _FORMAT:
        raise CheckpointError(
            f"{directory} is a checkpoint of format {plain.get('format')}, not {_FORMAT}; use the version that wrote it."
        )
    return _reunite(plain["state"], tensors)


def check_state(directory: Path) -> None:
    """Compare the files of a state with their checksums.

    Raises:
        CheckpointError: a file is damaged or missing.
    """
    try:
        expected = json.loads((directory / "checksums.json").read_text(encoding="utf-8"))
        found = {name: _checksum(directory / name) for name in _FILES}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{directory} holds no readable checkpoint ({error}); resume from another, or start anew."
        ) from error
    if expected != found:
        damaged = [name for name in _FILES if not isinstance(expected, dict) or expected.get(name) != found[name]]
        raise CheckpointError(
            f"{directory} is damaged: {' and '.join(damaged) or 'checksums.json'} is not what was written; resume from another "
            "checkpoint, or start anew."
        )


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]


def _separate(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().clone().contiguous()
        return {_TENSOR: path}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise CheckpointError(
                f"The checkpoint state has keys at {path or 'its root'} that are not text: {list(value)[:3]}."
            )
        return {key: _separate(entry, f"{path}/{key}", tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_separate(entry, f"{path}/{index}", tensors) for index, entry in enumerate(value)]
    return value


def _reunite(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _reunite(entry, tensors) for key, entry in value.items()}
    if isinstance(value, list):
        return [_reunite(entry, tensors) for entry in value]
    return value


class RecoverCheckpoints:
    """The recover checkpoints of a run: ``step_00000012`` and so on in one directory, the newest few kept."""

    _NAME = re.compile(r"step_(\d{8,})")

    def __init__(self, directory: str | Path, keep: int = 2) -> None:
        """
        Args:
            directory: where they are kept; made when the first is written.
            keep: how many of the newest stay.
        """
        self.directory = Path(directory)
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint, ascending."""
        if not self.directory.is_dir():
            return []
        found = (self._NAME.fullmatch(path.name) for path in self.directory.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.directory / f"step_{step:08d}"

    def save(self, step: int, state: dict[str, Any], *, before_visible: Callable[[], object] | None = None) -> Path:
        """Write the checkpoint of a step, then remove the oldest above ``keep`` and all of later steps. Only rank 0 writes.

        One of a later step was damaged, or it is of a run that went back to before it.

        Args:
            step: its number.
            state: what is kept.
            before_visible: called when the files are written and before the checkpoint can be found: what has to be in
                step with it (a store's cursor) commits there.
        """
        if parallel.rank() == 0:
            write_state(self.path(step), state, before_visible=before_visible)
            kept = [each for each in self.steps() if each <= step][-self.keep :]
            for old in set(self.steps()) - set(kept):
                shutil.rmtree(self.path(old))
        return self.path(step)

    def load(self, step: int | None = None) -> tuple[int, dict[str, Any]]:
        """The state of a step, and the step.

        Args:
            step: None: the newest that is whole; damaged ones are passed over, with a warning. The first rank chooses for all.

        Raises:
            CheckpointError: there is none, or none that is whole.
        """
        found = parallel.from_first_rank(lambda: self._newest_whole() if step is None else step)
        if found not in self.steps():
            raise CheckpointError(
                f"{self.directory} has no checkpoint{'' if step is None else f' of step {step}'} (it has steps {self.steps()}); "
                "set recover.mode=auto to start anew where there is none."
            )
        return found, read_state(self.path(found))

    def _newest_whole(self) -> int | None:
        """The newest step whose checkpoint is not damaged; None where there is no checkpoint."""
        steps = self.steps()
        for step in reversed(steps):
            try:
                check_state(self.path(step))
            except CheckpointError as error:
                logger.warning("%s It is passed over, and the checkpoint before it is taken.", error)
            else:
                return step
        if steps:
            raise CheckpointError(
                f"{self.directory}: the checkpoints of steps {steps} are all damaged, so the run cannot go on; set another "
                "trial_name, or move the directory away to start anew."
            )
        return None


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's global generators."""
    numbers = numpy.random.get_state(legacy=False)
    key = torch.from_numpy(numbers["state"]["key"].astype(numpy.int64))
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": {**numbers, "state": {**numbers["state"], "key": key}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the global generators to what ``random_states`` gave."""
    kind, internal, gauss = states["python"]
    random.setstate((kind, tuple(internal), gauss))
    numbers = states["numpy"]
    key = numbers["state"]["key"].numpy().astype(numpy.uint32)
    numpy.random.set_state({**numbers, "state": {**numbers["state"], "key": key}})
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
