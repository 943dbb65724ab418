"""The contents of a journal: one class for each kind of record, and functions that pack records and their values.

A file begins with ``VERSION``. Each record follows as a mark, its length, its checksum (``frame``) and a MessagePack array. Token ids are
packed as int32, log-probabilities as float32 if that loses nothing and as float64 otherwise. A call is a delta: its prompt is the first
``kept`` tokens of an earlier call's prompt and output, followed by ``added``. A task is packed with a digest in place of each PIL image,
because the dataset has the images; ``with_images`` puts them back.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import numpy as np
import xxhash

from rollwright.experience.recorder import TOKEN_TYPE

VERSION = b"RWJRNL2\n"
VERSION_WITHOUT_MARKS = b"RWJRNL1\n"
MARK = b"\x1eRW\xf7"  # read as a length it exceeds any file, so the two versions cannot be confused
HEAD = struct.Struct("<4sIQ")  # mark, length, checksum
LENGTH = struct.Struct("<IQ")  # length, checksum


def frame(body: bytes) -> bytes:
    """Frame a packed record for writing."""
    return HEAD.pack(MARK, len(body), xxhash.xxh3_64_intdigest(body)) + body


# -- kinds of records --------------------------------------------------------------------------------------------------


class Record(msgspec.Struct, array_like=True, omit_defaults=False, gc=False):
    """Base class of the records. A new field goes to the end and needs a default."""


class Arguments(Record, tag="arguments"):
    """Generation arguments that calls of this file refer to by ``number``."""

    number: int
    gconfig: dict[str, Any]


class Begin(Record, tag="begin"):
    """Beginning of an episode: one attempt of one sample."""

    episode: int  # unique among those of this writer
    ordinal: int
    index: int
    attempt: int
    is_eval: bool
    version: int  # of the weights when the episode began
    workflow: str
    samples_asked: int
    task: bytes | None  # the packed row, or None if it cannot be packed (see ``task_error``)
    task_error: str
    time: float


class ModelCall(Record, tag="call"):
    """A model request and its answer, or the reason for its rejection."""

    episode: int
    index: int  # number among the calls of the episode, including rejected calls
    conversation: int
    turn: int
    base: int  # index of the earlier call whose prompt and output this prompt begins with; -1 if none
    kept: int  # number of tokens shared with that call
    added: bytes
    output: bytes
    logprobs: bytes
    versions: int | bytes  # one for all tokens, or packed
    temperature: float
    stop_reason: str
    stop_match: str | int | None
    seed: int | None
    arguments: int
    started: float
    finished: float
    latency: float
    ttft: float
    layout: list[list[int]] | None = None  # position_ids and branch_ids of the prompt
    logprobs_shifted: bool = False
    metadata: bytes | None = None
    refused: str | None = None  # message of the PromptTooLongError that rejected the request
    server: str = ""  # server that answered; empty for an engine in this process
    experts: bytes = (
        b""  # record of the experts of each token (inference/routed_experts.py), from the end of that of ``experts_base`` on
    )
    experts_width: int = 0  # entries of a token; 0 if nothing is recorded
    experts_base: int = -1  # index of the call whose record this one continues; -1 if none


class DurableResult(Record, tag="result"):
    """The result of a durable call."""

    episode: int
    name: str
    key: int  # hash of the arguments
    kind: str
    value: bytes | None
    error: list[str] | None  # class and message of the exception
    state: bytes | None  # state of a restorable environment
    time: float
    seconds: float


class Row(Record):
    """A row of an episode, stored as a delta of the row's last call. Log-probabilities and versions are stored only in the calls."""

    base: int
    kept: int
    added: bytes
    mask: list[int]  # begin and end of each stretch of trained tokens
    reward: float
    truncated: bool
    digest: bytes  # digest of ids, mask, log-probabilities and versions
    figures: dict[str, float] = {}  # metrics of the row's experience
    agent: str = ""  # the player that made it
    role: str = ""


class End(Record, tag="end"):
    """End of an episode: accepted, rejected, failed or cut."""

    episode: int
    outcome: str
    reason: str
    rows: list[Row]
    time: float
    traceback: str = ""  # traceback of its exception
    figures: dict[str, float | str] = {}  # what the episode reported: numbers, parts of its reward, and texts such as verdicts


class GroupEnd(Record, tag="group"):
    """End of a task's group: delivered, or dropped with a reason."""

    ordinal: int
    group: int  # id of the group in batches
    is_eval: bool
    state: str
    reason: str
    samples: int
    time: float
    version: int | None = None  # of the weights when the group was admitted
    result: bytes = b""  # what the draws of its workflow learn from it (``TaskDraws``), packed


class Trained(Record, tag="trained"):
    """A row that a step trained on."""

    step: int
    group: int
    sample: int
    reward: float
    advantage: float | bytes  # one for all trained tokens, or packed (float32)
    tokens: int  # number of trained tokens
    logprobs: bytes = b""  # log-probabilities of these tokens under the trainer's weights (float32)
    entropies: bytes = b""  # entropy of the policy at these tokens (float16)
    teacher_logprobs: bytes = b""  # a teacher's log-probabilities of these tokens (float32; nan where it did not teach)
    values: bytes = b""  # the critic's value of the state before each of them (float32)


class Published(Record, tag="published"):
    """Publication of weights, including the audit of the step."""

    step: int
    version: int
    audit: dict[str, float]
    time: float
    way: str = ""  # how the weights were transferred; empty if they were not published
    seconds: float = 0.0
    bytes: int = 0  # size of the transfer
    engines: list[str] = []  # engines that hold the weights


class Phase(Record, tag="phase"):
    """Duration of a phase of a step."""

    step: int
    name: str
    seconds: float
    began: float = 0.0  # first start in this step


class Checkpoint(Record, tag="checkpoint"):
    """A recovery checkpoint was written; it is consistent with the journal up to here."""

    step: int
    frontier: int
    time: float


class Resumed(Record, tag="resumed"):
    """This process resumes a run; later steps in the records of earlier processes are superseded."""

    step: int  # step of the recovery checkpoint; 0 if there was none
    version: int
    frontier: int
    episodes: int  # episodes that continue from the journal
    tokens: int  # tokens already sampled in these episodes
    time: float


class Files(Record, tag="files"):
    """The journal's files at the time of writing, with a minimum size of each; a file that is shorter later was truncated."""

    sizes: dict[str, int]
    time: float


class Closed(Record, tag="closed"):
    """The last record of a file: its process started another file or ended."""

    time: float


AnyRecord = (
    Arguments
    | Begin
    | ModelCall
    | DurableResult
    | End
    | GroupEnd
    | Trained
    | Published
    | Phase
    | Checkpoint
    | Resumed
    | Files
    | Closed
)
KINDS: tuple[type[Record], ...] = get_args(AnyRecord)


# -- values ------------------------------------------------------------------------------------------------------------


def plain_value(value: Any) -> Any:
    """Convert subclasses of str, mappings, numbers and arrays to types that MessagePack supports.

    Raises:
        TypeError: the value has another type.
    """
    if isinstance(value, str):  # a subclass, such as a secret, which the journal redacts
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is neither number, text, list nor dict")


_VALUES = msgspec.msgpack.Encoder(enc_hook=plain_value)
encode = _VALUES.encode
decode = msgspec.msgpack.Decoder(AnyRecord).decode


def pack_value(value: Any, encoder: msgspec.msgpack.Encoder = _VALUES) -> bytes:
    """Pack None, numbers, strings, bytes, lists, tuples, dicts, and numbers and arrays of NumPy and torch.

    Raises:
        TypeError: the value contains another type, or a string that is not valid Unicode (a lone surrogate).
        OverflowError: the value contains an integer of more than 64 bits.
    """
    try:
        return encoder.encode(value)
    except UnicodeEncodeError as error:
        raise TypeError(f"text that is no Unicode ({error})") from None


def unpack_value(packed: bytes) -> Any:
    """Unpack the result of ``pack_value``; tuples and arrays become lists."""
    return msgspec.msgpack.decode(packed, strict=False)


def unpack_floats(packed: bytes, count: int) -> np.ndarray:
    """Unpack ``count`` float32 or float64 values; the number of bytes tells which."""
    return np.frombuffer(packed, dtype="<f4" if len(packed) == 4 * count else "<f8").astype(np.float64)


def pack_versions(versions: np.ndarray) -> int | bytes:
    """Pack versions: one number if all are equal, otherwise int32 bytes."""
    if len(versions) and versions.strides == (0,):  # a broadcast number; an empty array has no strides either
        return int(versions[0])
    packed = versions.tobytes()
    if packed and packed == packed[:4] * len(versions):
        return int(versions[0])
    return packed


def unpack_versions(packed: int | bytes, count: int) -> np.ndarray:
    """Unpack the result of ``pack_versions``."""
    return np.full(count, packed, dtype=np.int32) if isinstance(packed, int) else np.frombuffer(packed, dtype="<i4")


def unpack_experts(packed: bytes, count: int, width: int) -> np.ndarray:
    """Unpack a record of experts, ``[count, width]``; the number of bytes tells its type."""
    return np.frombuffer(packed, dtype=np.uint8 if len(packed) == count * width else "<i2").reshape(count, width)


def tokens_in(packed: bytes) -> int:
    """Return the number of packed tokens."""
    return len(packed) // TOKEN_TYPE.itemsize


# -- tasks and their images --------------------------------------------------------------------------------------------

_IMAGE = 1  # the code of MessagePack's extension type
_WITH_PALETTE = ("P", "PA")  # modes


@dataclass(frozen=True)
class ImageDigest:
    """Digest that replaces an image of a task."""

    mode: str
    width: int
    height: int
    digest: str

    def __str__(self) -> str:
        return f"⟨{self.mode} image of {self.width}×{self.height} pixels, {self.digest[:8]}⟩"

    __repr__ = __str__


def digest_of(image: Any) -> ImageDigest:
    """Compute the digest of a PIL image; it is equal for equal pixels and, in palette modes, equal palettes.

    Raises:
        TypeError: the image cannot be read.
    """
    try:
        pixels = image.tobytes() + (image.convert("RGBA").tobytes() if image.mode in _WITH_PALETTE else b"")
    except Exception as error:  # PIL reads the file on access and raises many types for a damaged one
        raise TypeError(f"an image that cannot be read: {error}") from None
    return ImageDigest(image.mode, image.width, image.height, xxhash.xxh3_128_hexdigest(pixels))


def pack_task(task: dict[str, Any]) -> bytes:
    """Pack a row of a dataset; each image is replaced by a digest.

    Raises:
        TypeError, OverflowError: as for ``pack_value``.
    """
    return pack_value(task, _TASKS)


def unpack_task(packed: bytes) -> dict[str, Any]:
    """Unpack the result of ``pack_task``; tuples and arrays become lists, and images become ``ImageDigest``."""
    return _DECODER.decode(packed)


def images_in(value: Any) -> Iterator[Any]:
    """Yield the images of a row, or the digests of an unpacked one."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from images_in(item)
    elif isinstance(value, ImageDigest) or _is_image(value):
        yield value


def with_images(value: Any, find: Callable[[ImageDigest], Any]) -> Any:
    """Replace each digest in an unpacked row by the image that ``find`` returns."""
    if isinstance(value, ImageDigest):
        return find(value)
    if isinstance(value, dict):
        return {name: with_images(item, find) for name, item in value.items()}
    return [with_images(item, find) for item in value] if isinstance(value, list) else value


def _is_image(value: Any) -> bool:
    module = sys.modules.get("PIL.Image")  # loaded if there are images
    return module is not None and isinstance(value, module.Image)


def _pack(value: Any) -> Any:
    if _is_image(value):
        value = digest_of(value)
    if isinstance(value, ImageDigest):
        return msgspec.msgpack.Ext(_IMAGE, msgspec.msgpack.encode((value.mode, value.width, value.height, value.digest)))
    return plain_value(value)


def _unpack(code: int, data: memoryview) -> Any:
    return ImageDigest(*msgspec.msgpack.decode(data)) if code == _IMAGE else msgspec.msgpack.Ext(code, bytes(data))


_TASKS = msgspec.msgpack.Encoder(enc_hook=_pack)
_DECODER = msgspec.msgpack.Decoder(ext_hook=_unpack, strict=False)
