"""Recovery checkpoints: the whole state that a run resumes from, written atomically and read without pickle.

A state is a nested dict whose leaves are tensors or JSON values. ``torch.distributed.checkpoint`` writes the tensors of models
(``ModelTensors``) to ``parts/`` as safetensors; each rank writes its own shards. Rank 0 writes other tensors to ``state.safetensors`` and
the rest to ``state.json``. ``checksums.json`` has a checksum of each file, so a damaged checkpoint is detected and not loaded. The state
includes the states of the random generators.

Invariants:

* a checkpoint becomes visible only after every rank has written its part;
* in writing and reading, no rank holds more than its own part (and one copy of it during a write in the background);
* the number of ranks that read a checkpoint may differ from the number that wrote it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from rollwright.atomic import replaced_directory
from rollwright.errors import CheckpointError, LostRankError, RollwrightError
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.fsdp import call_checkpoint
from rollwright.training.parallel import local_tensor, sharded_like

logger = getLogger("checkpoint")

_TENSOR, _PART, _SHAPE = "__tensor__", "__part__", "shape"
_FORMAT = 3
_PARTS = "parts"
_FILES = ("state.json", "state.safetensors")
#: Minimum size of a rank's files in bytes, and maximum number of files. While a file is written, a copy of it is held in memory.
_FILE_BYTES, _MOST_FILES = 64 << 20, 16


class ModelTensors(dict[str, Any]):
    """Tensors by name (nested dicts are allowed), each of which is sharded over ranks or equal on all ranks."""


@dataclass(frozen=True)
class SavedTensor:
    """Reference to a tensor in a checkpoint; ``fill`` reads it into its target."""

    directory: Path
    name: str
    shape: tuple[int, ...]


@torch.no_grad()
def fill(pairs: Iterable[tuple[Tensor | SavedTensor, Tensor]]) -> None:
    """Copy values into existing tensors; each rank copies its own shards. Collective.

    Args:
        pairs: values and their targets. A value is a whole tensor, a tensor sharded like its target, or a ``SavedTensor``.

    Raises:
        CheckpointError: a checkpoint lacks a tensor, or cannot be read.
    """
    saved: dict[Path, dict[str, Tensor]] = {}
    for value, target in pairs:
        if isinstance(value, SavedTensor):
            saved.setdefault(value.directory, {})[value.name] = target
        elif isinstance(value, DTensor):
            local_tensor(target).copy_(local_tensor(value))
        else:
            target.copy_(sharded_like(value, target))
    for directory, targets in saved.items():
        reader = HuggingFaceStorageReader(str(directory / _PARTS))
        try:
            with parallel.watched():
                call_checkpoint(load, targets, storage_reader=reader, process_group=parallel.checkpoint_group())
        except LostRankError:
            raise
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"{directory} cannot be read: {_reason(error)}") from error


# -- writing -----------------------------------------------------------------------------------------------------------


def write_state(
    directory: str | Path,
    state: dict[str, Any],
    *,
    before_visible: Callable[[], object] | None = None,
    in_background: bool = False,
) -> Future[None]:
    """Write a nested dict of tensors and JSON values. The directory appears atomically. Collective.

    Args:
        directory: target directory; replaced if it exists.
        state: the state. On ranks other than 0 only ``ModelTensors`` are written.
        before_visible: called on rank 0 after all files are written and before the checkpoint becomes visible.
        in_background: return after the shards are copied, and write them while training continues.

    Returns:
        A future that completes when the checkpoint is visible, or fails with the error of any rank.

    Raises:
        CheckpointError: the checkpoint could not be written (only without ``in_background``).
    """
    tensors: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    plain = _separate(state, "", tensors, parts)
    finishing = contextlib.ExitStack()

    def begin() -> str:
        return str(finishing.enter_context(replaced_directory(directory, before_visible=before_visible)))

    draft = Path(parallel.from_first_rank(begin))

    def finish() -> None:
        save_file(tensors, draft / "state.safetensors")
        (draft / "state.json").write_text(json.dumps({"format": _FORMAT, "state": plain}), encoding="utf-8")
        sums = {name: _checksum(draft / name) for name in _FILES}
        for path in sorted((draft / _PARTS).glob("*.json")):
            sums |= json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
        (draft / "checksums.json").write_text(json.dumps(sums))
        finishing.close()

    writer = _PartWriter(draft / _PARTS, _files_of(parts), finish)
    options: dict[str, Any] = {"storage_writer": writer, "process_group": parallel.checkpoint_group()}
    written: Future[None] = Future()

    def end(failure: BaseException | None) -> None:
        if failure is not None:
            finishing.__exit__(type(failure), failure, failure.__traceback__)
            cause = next((each for each in _causes(failure).values() if isinstance(each, RollwrightError)), None)
            reason = CheckpointError(f"{directory} could not be written: {_reason(failure)}")
            written.set_exception(cause or reason)
        else:
            written.set_result(None)

    try:
        if not parts:
            parallel.from_first_rank(finish)
        elif in_background:
            stager = DefaultStager(StagingOptions(False, False, False, False))
            made: Any = call_checkpoint(async_save, parts, async_stager=stager, **options)
            made.add_done_callback(lambda future: end(future.exception()))
            made.add_done_callback(lambda _: stager.close())
            return written
        else:
            call_checkpoint(save, parts, **options)
    except (Exception, CheckpointException) as error:
        end(error)
        raise written.exception() from error  # type: ignore[misc]
    end(None)
    return written


class _PartWriter(HuggingFaceStorageWriter):
    """Writes this rank's shards with a checksum of each file; rank 0 then makes the checkpoint visible."""

    def __init__(self, path: Path, files: dict[str, int], finish: Callable[[], None]) -> None:
        super().__init__(str(path), fqn_to_index_mapping=files, save_distributed=True)
        self._finish = finish

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        number = plan.storage_data["shard_index"]
        directory = Path(self.path)
        files = sorted(directory.glob(f"shard-{number:05d}-*.safetensors"))
        sums = {f"{_PARTS}/{path.name}": _checksum(path) for path in files}
        (directory / f"checksums-{number:05d}.json").write_text(json.dumps(sums))
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        self._finish()


def _files_of(parts: dict[str, Tensor]) -> dict[str, int]:
    """Assign each tensor to one of this rank's files. Returns file numbers by tensor name."""
    files, number, size = {}, 1, 0
    most = max(_FILE_BYTES, sum(local_tensor(tensor).nbytes for tensor in parts.values()) // _MOST_FILES)
    for name, tensor in parts.items():
        if size and size + local_tensor(tensor).nbytes > most:
            number, size = number + 1, 0
        size += local_tensor(tensor).nbytes
        files[name] = number
    return files


def _causes(failure: BaseException) -> dict[int, BaseException]:
    """Return the exceptions of the failed ranks, by rank. torch wraps them in its own exception."""
    return (
        {rank: error for rank, (error, _) in failure.failures.items()}
        if isinstance(failure, CheckpointException)
        else {0: failure}
    )


def _reason(failure: BaseException) -> str:
    return "; ".join(f"{type(error).__name__} on rank {rank}: {error}" for rank, error in _causes(failure).items())


def _separate(value: Any, path: str, tensors: dict[str, Tensor], parts: dict[str, Tensor], *, in_model: bool = False) -> Any:
    in_model = in_model or isinstance(value, ModelTensors)
    if isinstance(value, Tensor) and in_model and (value.dim() or isinstance(value, DTensor)):
        parts[path] = value.detach()
        return {_PART: path, _SHAPE: list(value.shape)}
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().clone().contiguous()
        return {_TENSOR: path}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise CheckpointError(
                f"The checkpoint state has keys at {path or 'its root'} that are not strings: {list(value)[:3]}."
            )
        return {key: _separate(entry, f"{path}/{key}", tensors, parts, in_model=in_model) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_separate(entry, f"{path}/{index}", tensors, parts, in_model=in_model) for index, entry in enumerate(value)]
    return value


# -- reading -----------------------------------------------------------------------------------------------------------


def read_state(directory: str | Path) -> dict[str, Any]:
    """Read a state that ``write_state`` wrote. Tensors of models become ``SavedTensor``; other tensors are read to the CPU.

    Only ``check_state`` finds damage that leaves the files readable.

    Raises:
        CheckpointError: there is no readable checkpoint, or it has another format.
    """
    directory = Path(directory)
    try:
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
    return _reunite(plain["state"], tensors, directory)


def check_state(directory: Path, *, share: int = 0, shares: int = 1) -> None:
    """Compare the files of a state with their checksums.

    Args:
        directory: directory of the state.
        share, shares: check every ``shares``-th file from ``share`` on, so that ranks divide the files.

    Raises:
        CheckpointError: a file is damaged or missing.
    """
    try:
        expected = json.loads((directory / "checksums.json").read_text(encoding="utf-8"))
        names = sorted(expected)
        if not {*_FILES} <= {*names}:
            raise ValueError(f"checksums.json lacks {' and '.join(_FILES)}")
        damaged = [name for name in names[share::shares] if expected[name] != _checksum(directory / name)]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{directory} holds no readable checkpoint ({error}); resume from another, or start anew."
        ) from error
    if damaged:
        raise CheckpointError(
            f"{directory} is damaged: {' and '.join(damaged)} is not what was written; resume from another "
            "checkpoint, or start anew."
        )


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]


def _reunite(value: Any, tensors: dict[str, Tensor], directory: Path) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        if value.keys() == {_PART, _SHAPE}:
            return SavedTensor(directory, value[_PART], tuple(value[_SHAPE]))
        return {key: _reunite(entry, tensors, directory) for key, entry in value.items()}
    if isinstance(value, list):
        return [_reunite(entry, tensors, directory) for entry in value]
    return value


class RecoverCheckpoints:
    """Recovery checkpoints of a run, named ``step_00000012`` and so on, in one directory. Only the newest are kept."""

    _NAME = re.compile(r"step_(\d{8,})")

    def __init__(self, directory: str | Path, keep: int = 2, *, in_background: bool = False) -> None:
        """
        Args:
            directory: directory of the checkpoints, visible to all ranks; created by the first ``save``.
            keep: number of checkpoints to keep.
            in_background: ``save`` returns after this rank's shards are copied. The next ``save``, ``load`` or ``wait`` waits for the
                write to finish.
        """
        self.directory = Path(directory)
        self.keep = keep
        self.in_background = in_background
        self._written: tuple[int, Future[None]] | None = None

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in ascending order."""
        if not self.directory.is_dir():
            return []
        found = (self._NAME.fullmatch(path.name) for path in self.directory.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self.directory / f"step_{step:08d}"

    def save(self, step: int, state: dict[str, Any], *, before_visible: Callable[[], object] | None = None) -> Path:
        """Write the checkpoint of a step, then remove the oldest checkpoints and those of later steps. Collective.

        A checkpoint of a later step exists only if it is damaged, or if the run has gone back to an earlier step.

        Args:
            step: number of the step.
            state: the state. On ranks other than 0 only ``ModelTensors`` are written.
            before_visible: called on rank 0 before the checkpoint becomes visible; commits external state (a store's cursor) together
                with it.

        Raises:
            CheckpointError: this checkpoint, or the previous one that was written in the background, could not be written.
        """
        self.wait()
        written = write_state(self.path(step), state, before_visible=before_visible, in_background=self.in_background)
        self._written = step, written
        if not self.in_background:
            self.wait()
        return self.path(step)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written in the background, if any, is visible. Collective.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._written is None:
            return
        (step, written), self._written = self._written, None
        written.result()
        if parallel.rank() == 0:
            newest = [each for each in self.steps() if each <= step][-self.keep :]
            for old in set(self.steps()) - set(newest):
                shutil.rmtree(self.path(old))

    def load(self, step: int | None = None) -> tuple[int, dict[str, Any]]:
        """Load a checkpoint, and return its step and state. Collective.

        Args:
            step: step to load. If None, the newest intact checkpoint is loaded, and damaged ones are skipped with a warning.

        Raises:
            CheckpointError: there is no checkpoint, or all are damaged.
        """
        self.wait()
        steps = parallel.from_first_rank(self.steps)
        if not steps or (step is not None and step not in steps):
            raise CheckpointError(
                f"{self.directory} has no checkpoint{'' if step is None else f' of step {step}'} (it has steps {steps}); "
                "set recover.mode=auto to start anew where there is none."
            )
        for candidate in reversed(steps) if step is None else [step]:
            try:
                self._check(candidate)
                return candidate, read_state(self.path(candidate))
            except CheckpointError as error:
                if step is not None:
                    raise
                if parallel.rank() == 0:
                    logger.warning("%s It is passed over, and the checkpoint before it is taken.", error)
        raise CheckpointError(
            f"{self.directory}: the checkpoints of steps {steps} are all damaged, so the run cannot continue from them; set "
            "recover.if_damaged=begin_again to restart from the initial weights with the journal's episodes, or set another trial_name."
        )

    def set_aside_damaged(self, into: Path) -> list[int]:
        """If no checkpoint is intact, move all of them to ``into`` and return their steps. Call this only on rank 0."""
        steps = self.steps()
        for step in reversed(steps):
            try:
                check_state(self.path(step))
                return []
            except CheckpointError as error:
                logger.warning("%s", error)
        if steps:
            into.mkdir(parents=True)
        for step in steps:
            self.path(step).rename(into / self.path(step).name)
        return steps

    def _check(self, step: int) -> None:
        """Check the files of a checkpoint, divided over the ranks. If one rank finds damage, every rank raises."""
        parallel.on_all_ranks(lambda: check_state(self.path(step), share=parallel.rank(), shares=parallel.world_size()))


def random_states() -> dict[str, Any]:
    """Return the states of the global random generators of Python, NumPy and torch."""
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
    """Restore the global random generators from a result of ``random_states``."""
    kind, internal, gauss = states["python"]
    random.setstate((kind, tuple(internal), gauss))
    numbers = states["numpy"]
    key = numbers["state"]["key"].numpy().astype(numpy.uint32)
    numpy.random.set_state({**numbers, "state": {**numbers["state"], "key": key}})
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
