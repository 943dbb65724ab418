"""Experiences as plain documents: what the file storage and the Parquet export are made of."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import torch

from rollwright.errors import StoreError
from rollwright.experience.experience import Experience, ExperienceId, plain_json

_FIELDS = {each.name for each in fields(Experience)}


def experience_document(experience: Experience) -> dict[str, Any]:
    """An experience as lists, numbers and text; fields that are not set are left out.

    Raises:
        StoreError: it carries images or other tensors that a text file is no place for.
    """
    if experience.multi_modal_inputs is not None:
        raise StoreError(
            f"experience {experience.eid} carries multi-modal inputs, which a text file cannot hold: use a database (store.type=sql)."
        )
    document: dict[str, Any] = {}
    for name in sorted(_FIELDS):
        value = getattr(experience, name)
        if value is None or value == {}:
            continue
        if isinstance(value, torch.Tensor):
            document[name] = value.tolist()
        elif isinstance(value, ExperienceId):
            document[name] = asdict(value)
        else:
            document[name] = plain_json(value, name)
    return document


def document_experience(document: dict[str, Any], where: str) -> Experience:
    """The experience of a document.

    Args:
        document: from :func:`experience_document`, or written by hand.
        where: file and line, for the message.

    Raises:
        StoreError: it has fields that an experience has not, or values that it cannot have.
    """
    unknown = sorted(set(document) - _FIELDS)
    if unknown:
        raise StoreError(f"{where}: an experience has no field {unknown[0]!r}; its fields are {', '.join(sorted(_FIELDS))}.")
    try:
        return Experience(**document)
    except Exception as error:  # a document from elsewhere can be wrong in any way
        raise StoreError(f"{where}: the experience cannot be read ({error}): mend or delete that line.") from error
