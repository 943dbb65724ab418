"""What an isolated workflow's process and its parent say to each other.

Frames are those of ``rewards.worker``: a kind, a length, that many bytes. The parent sends ``START`` and ``RUN`` (pickled) and
``ANSWER`` (JSON); the child sends ``READY``, ``ASK`` (JSON), ``DONE`` (experiences in safetensors bytes) and ``FAILED`` (text).
Only the parent's frames are unpickled, never the child's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rollwright import errors
from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError, WorkflowError
from rollwright.experience.experience import Experience
from rollwright.inference.request import ModelRequest, ModelResponse

START, RUN, ANSWER, READY, ASK, DONE, FAILED = b"S", b"U", b"A", b"R", b"Q", b"D", b"F"
_LENGTH = struct.Struct("<q")
_NOTHING = -1


def pack_experiences(experiences: Sequence[Experience] | None) -> bytes:
    """Experiences one after the other, each behind its length; None is kept apart from an empty list."""
    if experiences is None:
        return _LENGTH.pack(_NOTHING)
    parts = [_LENGTH.pack(len(experiences))]
    for experience in experiences:
        data = experience.serialize()
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def unpack_experiences(data: bytes) -> list[Experience] | None:
    """What ``pack_experiences`` packed."""
    (count,) = _LENGTH.unpack_from(data)
    if count == _NOTHING:
        return None
    place, experiences = _LENGTH.size, []
    for _ in range(count):
        (size,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        experiences.append(Experience.deserialize(data[place : place + size]))
        place += size
    return experiences


def request_document(request: ModelRequest) -> dict[str, Any]:
    """A request in JSON's types, without its tokenizer.

    Raises:
        WorkflowError: it carries images.
    """
    if request.multi_modal is not None or request.image_data is not None:
        raise WorkflowError(
            "a workflow with isolation: process sent images to the model, which only goes with isolation: thread."
        )
    plain = {
        name: getattr(request, name)
        for name in ("input_ids", "rid", "metadata", "seed", "position_ids", "branch_ids", "lora_name")
    }
    return {**plain, "gconfig": asdict(request.gconfig)}


def document_request(document: dict[str, Any], tokenizer: Any) -> ModelRequest:
    """The request of a document."""
    return ModelRequest(**{**document, "gconfig": GenerationHyperparameters(**document["gconfig"])}, tokenizer=tokenizer)


def response_document(response: ModelResponse) -> dict[str, Any]:
    """A response in JSON's types."""
    return asdict(response)


def document_response(document: dict[str, Any]) -> ModelResponse:
    """The response of a document."""
    return ModelResponse(**document)


def raised_document(error: BaseException) -> dict[str, str]:
    """An error of the parent's, for the child to raise."""
    return {"type": type(error).__name__, "text": str(error)}


def document_raised(document: dict[str, str]) -> Exception:
    """The error of a document: of its own type where it is one of ours."""
    kind = getattr(errors, document["type"], None)
    if isinstance(kind, type) and issubclass(kind, errors.RollwrightError):
        return kind(document["text"])
    return EngineError(f"{document['type']}: {document['text']}")
