"""Tags and a note about a run, kept in ``notes.json`` beside what the run wrote. It is the only file of a run that the viewer writes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from rollwright.atomic import read_json, remedy_of, write_json
from rollwright.errors import DataError

FILE = "notes.json"
_EMPTY: dict[str, Any] = {"tags": [], "note": ""}


class Notes(BaseModel):
    """What a reader writes about a run.

    Attributes:
        tags: short words by which the list of runs can be filtered.
        note: free text.
        seen: ``seen`` of the notes that the reader saw; notes that somebody else has changed since then are not replaced.
    """

    model_config = ConfigDict(extra="forbid")

    tags: list[Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=50, pattern=r"^[^,\s]+$")]] = (
        Field(max_length=20)
    )
    note: str = Field(max_length=10_000)
    seen: str


def read_notes(directory: Path) -> dict[str, Any]:
    """Return ``tags``, ``note`` and ``seen`` of a run; empty ones if there is no file, or none that can be read."""
    try:
        found = read_json(directory / FILE)
        tags, note = found.get("tags"), found.get("note")
        is_valid = isinstance(note, str) and isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)
        known = {"tags": tags, "note": note} if is_valid else _EMPTY
    except (OSError, ValueError):
        known = _EMPTY
    return {**known, "seen": hashlib.sha256(repr((known["tags"], known["note"])).encode("utf-8", "replace")).hexdigest()[:16]}


def write_notes(directory: Path, notes: Notes) -> dict[str, Any]:
    """Replace the notes of a run, and return them as ``read_notes`` does.

    Raises:
        DataError: they were changed since the reader saw them, or the file cannot be written.
    """
    if read_notes(directory)["seen"] != notes.seen:
        raise DataError("somebody else has changed these tags or this note meanwhile: load the page again, then change them.")
    try:
        write_json(directory / FILE, {"tags": list(dict.fromkeys(notes.tags)), "note": notes.note})
    except OSError as error:
        raise DataError(f"{directory / FILE} cannot be written ({error}): {remedy_of(error)}.") from error
    return read_notes(directory)
