"""Experiences in files: the JSONL store, and the export to Parquet.

A JSONL file serves one writer and one trainer, or holds experiences from another source (worked examples,
preferences). Groups are read in the order of the lines. Claims, priorities and announcements need a database.
"""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch

from rollwright.atomic import line_with_checksum, number_of_line, replaced_file, write_json
from rollwright.errors import ConfigError, StoreError
from rollwright.experience.experience import Experience, ExperienceId
from rollwright.experience.packed import plain_json
from rollwright.store.batches import BatchRequest, StoredBatch, TrainingStore
from rollwright.store.database import poll
from rollwright.store.groups import Group, StoredGroup, experiences_of, group_name, oldest_version
from rollwright.store.sampling import Sampling
from rollwright.tracking.logging import getLogger

logger = getLogger("store")

_FIELDS = sorted(each.name for each in fields(Experience))


class FileStore(TrainingStore):
    """A JSONL file with one group per line: ``{"group": name, "ordinal": …, "attempt": …, "experiences": […]}``.

    A line may also be a single experience. ``<file>.cursor.json`` holds the reader's position at each checkpoint.

    Args:
        path: the file; the first ``append`` creates it.
    """

    announcements = None  # a file has no explorers that follow its trainer

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._cursor_path = self.path.with_name(f"{self.path.name}.cursor.json")
        self._lock = threading.RLock()
        self._writer: IO[bytes] | None = None
        self._names: set[str] = set()
        self._offset, self._line, self._batches = 0, 0, 0
        self._recovered = not self._cursor_path.exists()

    def append(self, group: Group, *, ordinal: int | None = None, name: str | None = None, attempt: int = 0) -> int:
        """See ``TrainingStore.append``. The group is written and flushed immediately; only one process may write the file."""
        rows = list(experiences_of(group))
        if not rows:
            raise StoreError(f"{self.path}: append was given a group without experiences: leave it out.")
        with self._lock:
            writer = self._open_writer()
            name = group_name(rows, ordinal, name)
            if name in self._names:
                return 0
            documents = [experience_document(each) for each in rows]
            line = {"group": name, "ordinal": ordinal, "attempt": attempt, "experiences": documents}
            writer.write(line_with_checksum(line).encode())
            writer.flush()
            self._names.add(name)
        return len(rows)

    def sample(
        self,
        *,
        groups: int | None = None,
        experiences: int | None = None,
        timeout: float | None = 0.0,
        partial_batch: bool = False,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> StoredBatch | None:
        """Return the next groups; see ``ExperienceStore.sample``. A batch that is not full is taken only with ``partial_batch``."""
        request = BatchRequest(groups, experiences)
        if not self._recovered:
            raise StoreError(
                f"{self.path} was read by an earlier trainer: call recover(checkpoint), or recover(None) to begin anew."
            )
        batch = poll(lambda: (self._take(request, partial=False), False), timeout, cancelled)
        return self._take(request, partial=True) if batch is None and partial_batch else batch

    def next_batch(self, request: BatchRequest, cancelled: Callable[[], bool]) -> StoredBatch | None:
        """Return the next groups of the file, or None if fewer than a batch are left.

        Each line is read once, in order, which is the only sampling that ``open_store`` accepts for a file. ``min_version`` is
        ignored, because versions in a file may come from any model.
        """
        batch = self.sample(groups=request.groups, experiences=request.experiences)
        if batch is None:
            logger.info("%s has no further batch", self.path)
        return batch

    def groups(self) -> Iterator[StoredGroup]:
        """See ``TrainingStore.groups``."""
        return (group for _, _, group in self._lines(0, 0, uses=0))

    def commit(self, checkpoint: str, *, version: int | None = None) -> int:
        """See ``TrainingStore.commit``. Returns 0, because a file counts no uses."""
        places = self._places()
        if checkpoint in places:
            raise StoreError(
                f"{self._cursor_path} has a checkpoint {checkpoint!r} already: give each checkpoint a name of its own."
            )
        places[checkpoint] = [self._offset, self._line, self._batches]
        write_json(self._cursor_path, places, indent=None, durable=True)
        return 0

    def recover(self, checkpoint: str | None) -> int:
        """See ``TrainingStore.recover``. Returns 0, because a file counts no uses."""
        places = self._places()
        if checkpoint is not None and checkpoint not in places:
            raise StoreError(
                f"{self._cursor_path} knows no checkpoint {checkpoint!r} (it knows {', '.join(places) or 'none'})."
            )
        names = list(places)
        kept = names[: names.index(checkpoint) + 1] if checkpoint is not None else []
        write_json(self._cursor_path, {name: places[name] for name in kept}, indent=None, durable=True)
        self._offset, self._line, self._batches = places[checkpoint] if checkpoint is not None else (0, 0, 0)
        self._recovered = True
        return 0

    def forget_used(self, *, sampling: Sampling | None = None, keep_checkpoints: int = 2) -> int:
        """See ``TrainingStore.forget_used``. Returns 0, because a file keeps its lines."""
        return 0

    def close(self) -> None:
        """Close the file and let another process write it."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _open_writer(self) -> IO[bytes]:
        if self._writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            writer = self.path.open("ab")
            try:
                fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                writer.close()
                raise StoreError(
                    f"{self.path} is being written by another process: several explorers need store.type=sql."
                ) from None
            end = 0
            for position, _, group in self._lines(0, 0, uses=0):
                end = position
                self._names.add(group.name)
            writer.truncate(end)  # removes the incomplete last line of a killed writer
            self._writer = writer
        return self._writer

    def _take(self, request: BatchRequest, partial: bool) -> StoredBatch | None:
        """Return the next batch. If it is not full (or, with ``partial``, empty), return None and keep the position."""
        with self._lock:
            found: list[StoredGroup] = []
            position, rows = (self._offset, self._line), 0
            for offset, line, group in self._lines(self._offset, self._line, uses=1):
                found.append(group)
                rows += len(group.experiences)
                position = offset, line
                if request.is_filled_by(len(found), rows):
                    break
            else:
                if not (partial and found):
                    return None
            self._offset, self._line = position
            self._batches += 1
            return StoredBatch(self._batches - 1, found)

    def _lines(self, offset: int, line: int, uses: int) -> Iterator[tuple[int, int, StoredGroup]]:
        """Yield end offset, number and group of each complete line; a last line without a newline is still being written."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                offset, line = offset + len(raw), line + 1
                if raw.strip():
                    yield offset, line, self._group(raw, line, uses)

    def _group(self, raw: bytes, line: int, uses: int) -> StoredGroup:
        where = f"line {line} of {self.path}"
        try:
            content: Any = json.loads(raw)
            if not isinstance(content, dict):
                raise ValueError("it is no JSON object")
            if number_of_line(raw) is not None:
                del content["checksum"]
        except ValueError as error:
            raise StoreError(f"{where} cannot be read ({error}): correct or delete it.") from None
        experiences = [document_experience(document, where) for document in content.get("experiences", [content])]
        version = min((oldest_version(each) for each in experiences), default=-1)
        grouped = content if "experiences" in content else {}
        name, attempt = grouped.get("group", f"line/{line}"), grouped.get("attempt", 0)
        return StoredGroup(line, name, grouped.get("ordinal"), attempt, version, uses, True, experiences)

    def _places(self) -> dict[str, list[int]]:
        return json.loads(self._cursor_path.read_text()) if self._cursor_path.exists() else {}


def experience_document(experience: Experience) -> dict[str, Any]:
    """Convert an experience to lists, numbers and strings, without the fields that are not set.

    Raises:
        StoreError: the experience has multi-modal inputs, which a text file cannot hold.
    """
    if experience.multi_modal_inputs is not None:
        raise StoreError(
            f"experience {experience.eid} carries multi-modal inputs, which a text file cannot hold: use a database (store.type=sql)."
        )
    document: dict[str, Any] = {}
    for name in _FIELDS:
        value = getattr(experience, name)
        if isinstance(value, ExperienceId):
            document[name] = asdict(value)
        elif value is not None and (isinstance(value, torch.Tensor) or value != {}):
            document[name] = plain_json(value, name)
    return document


def document_experience(document: dict[str, Any], where: str) -> Experience:
    """Create an experience from a document that was made by :func:`experience_document` or written by hand.

    Args:
        document: the fields of the experience.
        where: file and line of the document, for error messages.

    Raises:
        StoreError: the document has unknown fields or invalid values.
    """
    unknown = sorted(set(document) - set(_FIELDS))
    if unknown:
        raise StoreError(f"{where}: an experience has no field {unknown[0]!r}; its fields are {', '.join(_FIELDS)}.")
    try:
        return Experience(**document)
    except Exception as error:  # a document from another source can be wrong in any way
        raise StoreError(f"{where}: the experience cannot be read ({error}): correct or delete that line.") from error


# -- Parquet -------------------------------------------------------------------------------------------------------------

_ROWS_AT_ONCE = 2048
#: Columns of an experience that are written as JSON.
_DOCUMENTS = ("messages", "tools", "chosen_messages", "rejected_messages", "info", "metrics")
#: Columns and their types in pyarrow; "[…]" is a list. Images are not exported.
_COLUMNS = {
    **{"group": "string", "ordinal": "int64", "attempt": "int32", "group_version": "int64", "uses": "int32"},
    **{"complete": "bool_", "row": "int32", "eid": "string"},
    **{"tokens": "[int64]", "prompt_length": "int32", "action_mask": "[bool_]", "logprobs": "[float32]"},
    **{"versions": "[int32]", "token_rewards": "[float32]", "reward": "float64", "temperature": "float32"},
    **{"truncated": "bool_", "logprobs_shifted": "bool_", "advantages": "[float32]", "returns": "[float32]"},
    **{"position_ids": "[int64]", "branch_ids": "[int64]", "other_context": "[bool_]", "chosen": "[int64]"},
    **{"rejected": "[int64]", "prompt_text": "string", "response_text": "string"},
    **{"agent": "string", "role": "string", "environment": "string", "trainable": "bool_", "turn_ids": "int64"},
    **{"routed_experts": "[[int16]]"},
    **dict.fromkeys(_DOCUMENTS, "string"),
}


def export_parquet(groups: Iterable[StoredGroup], path: str | Path) -> int:
    """Write groups to a Parquet file that appears only once it is complete. Returns the number of rows.

    ``groups`` is consumed while writing, so memory does not grow with the store. Multi-modal inputs are not exported.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ConfigError("the export to Parquet needs pyarrow, which is not installed: pip install pyarrow.") from None

    def kind(name: str) -> Any:
        return pyarrow.list_(kind(name[1:-1])) if name.startswith("[") else getattr(pyarrow, name)()

    schema = pyarrow.schema([(name, kind(each)) for name, each in _COLUMNS.items()])
    count = 0
    rows = (_row(group, index, each) for group in groups for index, each in enumerate(group.experiences))
    with replaced_file(path) as draft, pyarrow.parquet.ParquetWriter(draft, schema, compression="zstd") as writer:
        while chunk := list(islice(rows, _ROWS_AT_ONCE)):
            writer.write_table(pyarrow.Table.from_pylist(chunk, schema=schema))
            count += len(chunk)
    return count


def _row(group: StoredGroup, index: int, experience: Experience) -> dict[str, Any]:
    document = experience_document(replace(experience, multi_modal_inputs=None))
    document |= {name: json.dumps(document[name]) for name in _DOCUMENTS if document.get(name)}
    whole = {name: getattr(group, name) for name in ("ordinal", "attempt", "uses", "complete")}
    return {**document, **whole, "group": group.name, "group_version": group.version, "row": index, "eid": str(experience.eid)}
