"""What a journal holds: one class for each kind of record, and how records and their values are packed.

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
    """Base of the records; a new field goes to the end, with a default."""


class Arguments(Record, tag="arguments"):
    """Generation arguments that calls of this file refer to by ``number``."""

    number: int
    gconfig: dict[str, Any]


class Begin(Record, tag="begin"):
    """An episode begins: one attempt of one sample."""

    episode: int  # unique among those of this writer
    ordinal: int
    index: int
    attempt: int
    is_eval: bool
    version: int  # of the weights when it began
    workflow: str
    samples_asked: int
    task: bytes | None  # the row, packed; None: it holds what cannot be (``task_error``)
    task_error: str
    time: float


class ModelCall(Record, tag="call"):
    """A model request and its answer, or why it was refused."""

    episode: int
    index: int  # of the calls of the episode, refused ones included
    conversation: int
    turn: int
    base: int  # index of the call whose prompt and output this prompt begins with; -1: none
    kept: int  # how many tokens of these
    added: bytes
    output: bytes
    logprobs: bytes
    versions: int | bytes  # one for all tokens, or one each
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
    refused: str | None = None  # the message of a PromptTooLongError
    server: str = ""  # that answered; empty: the engine of this process


class DurableResult(Record, tag="result"):
    """The result of a durable call."""

    episode: int
    name: str
    key: int  # of the arguments
    kind: str
    value: bytes | None
    error: list[str] | None  # class and message of what it raised
    state: bytes | None  # of an environment that can be restored
    time: float
    seconds: float


class Row(Record):
    """A row of an episode, as a delta of the call that it ends with; log-probabilities and versions are those of its calls."""

    base: int
    kept: int
    added: bytes
    mask: list[int]  # where runs of trained tokens begin and end
    reward: float
    truncated: bool
    digest: bytes  # of ids, mask, log-probabilities and versions


class End(Record, tag="end"):
    """An episode came to its end: accepted, rejected, failed or cut."""

    episode: int
    outcome: str
    reason: str
    rows: list[Row]
    time: float
    traceback: str = ""  # of what it raised


class GroupEnd(Record, tag="group"):
    """What became of a task's group: delivered, or dropped and why."""

    ordinal: int
    group: int  # its id in batches
    is_eval: bool
    state: str
    reason: str
    samples: int
    time: float
    version: int | None = None  # of the weights when it was admitted


class Trained(Record, tag="trained"):
    """A row that a step trained on."""

    step: int
    group: int
    sample: int
    reward: float
    advantage: float | bytes  # of every trained token, or one each (float32)
    tokens: int
    logprobs: bytes = b""  # of the trained tokens under the trainer's weights (float32)
    entropies: bytes = b""  # of the policy at these tokens (float16)


class Published(Record, tag="published"):
    """Weights were published, and what the audit of the step found."""

    step: int
    version: int
    audit: dict[str, float]
    time: float
    way: str = ""  # how the weights went to the engines; empty: they were not published
    seconds: float = 0.0
    bytes: int = 0  # that were copied or sent
    engines: list[str] = []  # that hold them


class Phase(Record, tag="phase"):
    """How long a phase of a step took."""

    step: int
    name: str
    seconds: float
    began: float = 0.0  # for the first time in this step


class Checkpoint(Record, tag="checkpoint"):
    """A recover checkpoint was written: what is before it in the journal is in step with it."""

    step: int
    frontier: int
    time: float


class Resumed(Record, tag="resumed"):
    """This process goes on where an earlier one stood: later steps in the records of earlier processes are of a lost history."""

    step: int  # of the recover checkpoint; 0: there was none
    version: int
    frontier: int
    episodes: int  # that have a past
    tokens: int  # that were sampled in them
    time: float


class Files(Record, tag="files"):
    """The journal's files at the time of writing, with the least size of each: a file that is shorter later was truncated."""

    sizes: dict[str, int]
    time: float


class Closed(Record, tag="closed"):
    """The last record of a file: its process started another or had nothing more to write."""

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
    """What MessagePack has a form for, of texts and mappings of other classes, numbers and arrays.

    Raises:
        TypeError: it is something else.
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
    """Plain values as bytes: None, numbers, text, bytes, lists, tuples, dicts, and numbers and arrays of NumPy and torch.

    Raises:
        TypeError: it holds something else, or text that is no Unicode (a half of a surrogate pair).
        OverflowError: it holds an integer of more than 64 bits.
    """
    try:
        return encoder.encode(value)
    except UnicodeEncodeError as error:
        raise TypeError(f"text that is no Unicode ({error})") from None


def unpack_value(packed: bytes) -> Any:
    """What ``pack_value`` was given, with lists in place of tuples and arrays."""
    return msgspec.msgpack.decode(packed, strict=False)


def unpack_floats(packed: bytes, count: int) -> np.ndarray:
    """What ``pack_floats`` was given."""
    return np.frombuffer(packed, dtype="<f4" if len(packed) == 4 * count else "<f8").astype(np.float64)


def pack_versions(versions: np.ndarray) -> int | bytes:
    """One number where all are the same, else packed."""
    if len(versions) and versions.strides == (0,):  # one number in memory; an empty array has no strides either
        return int(versions[0])
    packed = versions.tobytes()
    if packed and packed == packed[:4] * len(versions):
        return int(versions[0])
    return packed


def unpack_versions(packed: int | bytes, count: int) -> np.ndarray:
    """What ``pack_versions`` was given."""
    return np.full(count, packed, dtype=np.int32) if isinstance(packed, int) else np.frombuffer(packed, dtype="<i4")


def tokens_in(packed: bytes) -> int:
    """How many tokens are packed."""
    return len(packed) // TOKEN_TYPE.itemsize


# -- tasks and their images --------------------------------------------------------------------------------------------

_IMAGE = 1  # the code of MessagePack's extension type
_WITH_PALETTE = ("P", "PA")  # modes


@dataclass(frozen=True)
class ImageDigest:
    """Stands for an image of a task."""

    mode: str
    width: int
    height: int
    digest: str

    def __str__(self) -> str:
        return f"⟨{self.mode} image of {self.width}×{self.height} pixels, {self.digest[:8]}⟩"

    __repr__ = __str__


def digest_of(image: Any) -> ImageDigest:
    """What stands for a PIL image: the same of all that have the same pixels, and the same palette where pixels are places in one.

    Raises:
        TypeError: it cannot be read.
    """
    try:
        pixels = image.tobytes() + (image.convert("RGBA").tobytes() if image.mode in _WITH_PALETTE else b"")
    except Exception as error:  # PIL reads a file when it is asked for pixels, and has many errors for a damaged one
        raise TypeError(f"an image that cannot be read: {error}") from None
    return ImageDigest(image.mode, image.width, image.height, xxhash.xxh3_128_hexdigest(pixels))


def pack_task(task: dict[str, Any]) -> bytes:
    """A row of a dataset as bytes, with the digest of each image.

    Raises:
        TypeError, OverflowError: as ``records.pack_value``.
    """
    return pack_value(task, _TASKS)


def unpack_task(packed: bytes) -> dict[str, Any]:
    """What ``pack_task`` was given, with lists in place of tuples and arrays, and ``ImageDigest`` in place of images."""
    return _DECODER.decode(packed)


def images_in(value: Any) -> Iterator[Any]:
    """The images of a row, and the digests of one that was unpacked."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from images_in(item)
    elif isinstance(value, ImageDigest) or _is_image(value):
        yield value


def with_images(value: Any, find: Callable[[ImageDigest], Any]) -> Any:
    """An unpacked row with the images themselves, each of which ``find`` finds."""
    if isinstance(value, ImageDigest):
        return find(value)
    if isinstance(value, dict):
        return {name: with_images(item, find) for name, item in value.items()}
    return [with_images(item, find) for item in value] if isinstance(value, list) else value


def _is_image(value: Any) -> bool:
    module = sys.modules.get("PIL.Image")  # a program that has images has loaded it
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
