"""Images in chats. Each image is read once, and represented in the prompt by the tokens that the model's own processor specifies.

Images are ``data:`` URLs or come from allowed hosts. Files of this machine are never read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from rollwright.data.vision import IMAGE, as_images, image_inputs, image_placeholder, load_processor, reads_images
from rollwright.errors import ConfigError, DataError
from rollwright.inference.server.exchange import CONTEXT_LENGTH_EXCEEDED, RequestError
from rollwright.inference.server.prompts import no_image

#: Memory for processed images; they are cached because a conversation sends its images with every call.
_CACHED_BYTES = 64 << 20
#: Maximum side length in pixels of an image with ``detail: low``.
_LOW_DETAIL = 512
_FETCH_SECONDS, _FETCHED_BYTES = 20.0, 20 << 20
_FORMATS, _PIXELS = ("PNG", "JPEG", "GIF", "WEBP"), 1 << 25
_DATA_URL = re.compile(r"data:image/(png|jpe?g|gif|webp);base64,", re.IGNORECASE)


@dataclass(frozen=True)
class SeenImage:
    """A processed image.

    Attributes:
        digest: hash of its URL and detail.
        image: the PIL image, for engines that process it themselves.
        outputs: tensors that the processor returned.
        tokens: number of tokens that represent the image in a prompt.
    """

    digest: str
    image: Any
    outputs: dict[str, Any]
    tokens: int

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return sum(value.nbytes for value in self.outputs.values()) + 3 * self.image.width * self.image.height


class ImageReader:
    """Reads the images of a server's chats. Thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        processor: image processor of the model, or its directory. None uses the one in the tokenizer's directory; without one, the model
            reads text only.
        hosts: hosts that images may be fetched from over http and https.
    """

    def __init__(self, tokenizer: Any, processor: Any = None, hosts: Iterable[str] = ()) -> None:
        self._tokenizer, self._given = tokenizer, processor
        self._hosts = frozenset(host.lower() for host in hosts)
        self._cache: OrderedDict[str, SeenImage] = OrderedDict()
        self._joined: OrderedDict[tuple[str, ...], dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def sees(self) -> bool:
        """True if the model reads images."""
        return self._given is not None or reads_images(self._tokenizer)

    @cached_property
    def processor(self) -> Any:
        """The model's processor, loaded when the first image arrives."""
        return load_processor(self._tokenizer.name_or_path if self._given is None else self._given, self._tokenizer)

    @cached_property
    def token(self) -> str:
        """Text of the image token, which the prompt repeats to represent an image."""
        return getattr(self._given, "image_token", None) or getattr(self._tokenizer, "image_token", None) or IMAGE

    @cached_property
    def token_id(self) -> int | None:
        """Id of the image token, or None if the model reads text only."""
        return self._tokenizer.convert_tokens_to_ids(self.token) if self.sees else None

    @cached_property
    def placeholder(self) -> str:
        """Text that represents one image in a prompt."""
        return image_placeholder(self.processor)

    def see(self, part: dict[str, Any], where: str) -> SeenImage:
        """Read the image of an ``image_url`` part.

        Args:
            part: the part of a message.
            where: location of the part in the request, for messages.

        Raises:
            RequestError: the model reads text only, or the image is broken, too large, or at an address that is not allowed.
        """
        given = part.get("image_url")
        url, detail = (given.get("url"), given.get("detail")) if isinstance(given, dict) else (given, None)
        if not self.sees:
            no_image(part, where)
        if not isinstance(url, str):
            raise RequestError(f"{where} has no image_url with a url.", param=where)
        digest = hashlib.sha256(f"{detail}|{url}".encode(errors="surrogatepass")).hexdigest()
        with self._lock:
            if seen := self._cache.get(digest):
                self._cache.move_to_end(digest)
        if seen is None:
            seen = self._processed(digest, self._bytes(url, where), detail, where)
            with self._lock:
                self._cache[digest] = seen
                size = sum(other.size for other in self._cache.values())
                while size > _CACHED_BYTES and len(self._cache) > 1:
                    size -= self._cache.popitem(last=False)[1].size
        return seen

    def _bytes(self, url: str, where: str) -> bytes:
        """Return the content of the image file at a URL."""
        if url[:5].lower() != "data:":
            return self._fetched(url, where)
        if not (head := _DATA_URL.match(url)):
            raise RequestError(
                f"{where} is {url[:40]!r}…; it has to be data:image/png;base64,… (or jpeg, gif, webp).", param=where
            )
        try:
            return base64.b64decode(url[head.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"{where} is no base64: {error}.", param=where) from None

    def _fetched(self, url: str, where: str) -> bytes:
        import httpx2

        try:
            parts = urlsplit(url)
            is_allowed = parts.scheme in ("http", "https") and (parts.hostname or "").lower() in self._hosts
        except ValueError:
            is_allowed = False
        if not is_allowed:
            raise RequestError(
                f"{where} is at {url[:80]!r}, which this server does not fetch: send the image as data:image/png;base64,…, or "
                f"allow its host (image_hosts; now {', '.join(sorted(self._hosts)) or 'none'}).",
                param=where,
            )
        found = bytearray()
        try:
            with httpx2.stream("GET", url, timeout=_FETCH_SECONDS, follow_redirects=False, trust_env=False) as response:
                if response.status_code != 200:
                    raise RequestError(f"{where}: {url[:80]!r} answered {response.status_code}.", param=where)
                for piece in response.iter_bytes():
                    found += piece
                    if len(found) > _FETCHED_BYTES:
                        raise RequestError(f"{where}: {url[:80]!r} has over {_FETCHED_BYTES} bytes.", param=where)
        except httpx2.HTTPError as error:
            raise RequestError(f"{where}: {url[:80]!r} cannot be fetched: {error}.", param=where) from error
        return bytes(found)

    def _processed(self, digest: str, data: bytes, detail: str | None, where: str) -> SeenImage:
        from PIL import Image

        try:
            opened = Image.open(io.BytesIO(data), formats=_FORMATS)
            if opened.width * opened.height > _PIXELS:
                raise RequestError(f"{where} has {opened.width} x {opened.height} pixels; send at most {_PIXELS}.", param=where)
            (image,) = as_images(opened, where)
        except (OSError, DataError, Image.DecompressionBombError) as error:
            raise RequestError(f"{where} is no image that can be read: {error}", param=where) from None
        if detail == "low":
            image.thumbnail((_LOW_DETAIL, _LOW_DETAIL))
        try:
            outputs = image_inputs(self.processor, image)
        except (ConfigError, ValueError) as error:  # no processor for this family, or a side that is too long for it
            raise RequestError(f"{where} cannot be shown to this server's model: {error}", param=where) from None
        merged = self.processor.image_processor.merge_size**2
        return SeenImage(digest, image, outputs, int(outputs["image_grid_thw"].prod(-1).sum()) // merged)

    def joined(self, images: list[SeenImage]) -> dict[str, Any]:
        """Concatenate the processor's outputs of several images. The result is cached for the next calls of the conversation."""
        import torch

        key = tuple(image.digest for image in images)
        with self._lock:
            if key not in self._joined:
                self._joined[key] = {
                    name: torch.cat([image.outputs[name] for image in images]) if len(images) > 1 else images[0].outputs[name]
                    for name in images[0].outputs
                }
                while len(self._joined) > 4:
                    self._joined.popitem(last=False)
            return self._joined[key]


class Gallery:
    """The images of one request, in their order in the prompt.

    Args:
        reader: the server's image reader.
        most_tokens: maximum number of tokens of a prompt, or None if it is not known.
    """

    def __init__(self, reader: ImageReader, most_tokens: int | None) -> None:
        self._reader, self._most_tokens = reader, most_tokens
        self._images: list[SeenImage] = []
        self._tokens = 0

    def add(self, part: dict[str, Any], where: str) -> str:
        """Add an image, and return the text that represents it in the prompt.

        Raises:
            RequestError: the image cannot be read, or does not fit into a prompt.
        """
        seen = self._reader.see(part, where)
        self._images.append(seen)
        self._tokens += seen.tokens
        if self._most_tokens is not None and self._tokens > self._most_tokens:
            raise RequestError(
                f"The images have over {self._most_tokens} tokens, the limit of a prompt.",
                param="messages",
                code=CONTEXT_LENGTH_EXCEEDED,
            )
        return self._reader.placeholder.replace(self._reader.token, self._reader.token * seen.tokens)

    def inputs(self, ids: list[int]) -> dict[str, Any]:
        """Return the fields of ``ModelRequest`` for these images.

        Args:
            ids: token ids of the prompt.

        Raises:
            RequestError: the prompt has image tokens that belong to no image.
        """
        token_id = self._reader.token_id
        if token_id is not None and (found := ids.count(token_id)) != self._tokens:
            raise RequestError(
                f"The messages hold {self._reader.token} {found - self._tokens} times, which stands for an image: leave it out, "
                "and send images as parts of type image_url.",
                param="messages",
            )
        if not self._images:
            return {}
        return {"multi_modal": self._reader.joined(self._images), "image_data": [seen.image for seen in self._images]}
