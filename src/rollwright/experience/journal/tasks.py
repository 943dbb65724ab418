"""A task as the journal has it: its values, and of each PIL image a digest of its pixels.

The dataset holds the images; a journal that repeated them for every sample would hold little else. What runs a recorded episode again takes
them from there (``with_images``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from rollwright.experience.journal.records import plain_value

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
    try:
        return _TASKS.encode(task)
    except UnicodeEncodeError as error:
        raise TypeError(f"text that is no Unicode ({error})") from None


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
