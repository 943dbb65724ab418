"""Recover checkpoints: everything that a run continues from, written whole or not at all, and read without pickle.

A state is a nested dict whose leaves are tensors or JSON values. Tensors go to ``state.safetensors``, the rest to
``state.json``. The states of the random generators are part of it.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollwright.atomic import replaced_directory
from rollwright.errors import CheckpointError
from rollwright.training import parallel

_TENSOR = "__tensor__"
_FORMAT = 1


def write_state(directory: str | Path, state: dict[str, Any], *, before_visible: Callable[[], object] | None = None) -> None:
    """Write a nested dict of tensors and JSON values; the directory appears whole or not at all, after ``before_visible()``."""
    tensors: dict[str, Tensor] = {}
    plain = _separate(state, "", tensors)
    with replaced_directory(directory, before_visible=before_visible) as draft:
        save_file(tensors, draft / "state.safetensors")
        (draft / "state.json").write_text(json.dumps({"format": _FORMAT, "state": plain}), encoding="utf-8")


def read_state(directory: str | Path) -> dict[str, Any]:
    """Read what ``write_state`` wrote; tensors are on the CPU.

    Raises:
        CheckpointError: there is no checkpoint, or it is of another format.
    """
    directory = Path(directory)
    try:
        plain = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        tensors = load_file(directory / "state.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{directory} holds no readable checkpoint ({error}); resume from another, or start anew."
        ) from error
    if plain.get("format") != _FORMAT:
        raise CheckpointError(
            f"{directory} is a checkpoint of format {plain.get('format')}, not {_FORMAT}; use the version that wrote it."
        )
    return _reunite(plain["state"], tensors)


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
        """Write the checkpoint of a step, then remove the oldest above ``keep``. Only rank 0 writes.

        Args:
            step: its number.
            state: what is kept.
            before_visible: called when the files are written and before the checkpoint can be found: what has to be in
                step with it (a store's cursor) commits there.
        """
        if parallel.rank() == 0:
            write_state(self.path(step), state, before_visible=before_visible)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(old))
        return self.path(step)

    def load(self, step: int | None = None) -> tuple[int, dict[str, Any]]:
        """The state of a step (None: the newest), and the step.

        Raises:
            CheckpointError: there is none.
        """
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            raise CheckpointError(
                f"{self.directory} has no checkpoint{'' if step is None else f' of step {step}'} (it has steps {steps}); "
                "set recover.mode=auto to start anew where there is none."
            )
        step = steps[-1] if step is None else step
        return step, read_state(self.path(step))


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's global generators."""
    kind, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    states: dict[str, Any] = {
        "python": {"kind": kind, "internal": list(internal), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(keys.astype(numpy.int64)),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the global generators to what ``random_states`` gave."""
    python, numpy_state = states["python"], states["numpy"]
    random.setstate((python["kind"], tuple(python["internal"]), python["gauss"]))
    keys = numpy_state["keys"].numpy().astype(numpy.uint32)
    numpy.random.set_state(
        (numpy_state["name"], keys, numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"])
    )
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
