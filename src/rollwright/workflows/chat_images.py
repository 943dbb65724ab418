"""Images in the messages of ``ModelWrapper.chat``, for models that read them.

The images are read as the servers read them (``inference.server.images``), which needs the extra ``openai``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollwright.data.vision import reads_images
from rollwright.errors import ConfigError, WorkflowError

if TYPE_CHECKING:
    from rollwright.inference.server.images import ImageReader


@functools.lru_cache(maxsize=4)
def image_reader(tokenizer: Any) -> ImageReader | None:
    """Return the reader of images for a model's chats, or None if the model reads text only.

    Raises:
        ConfigError: the extra ``openai`` is missing.
    """
    if not reads_images(tokenizer):
        return None
    try:
        from rollwright.inference.server.images import ImageReader
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"chats of a model that reads images need the package {error.name}: pip install 'rollwright[openai]'."
        ) from error
    return ImageReader(tokenizer)


class ChatGallery:
    """The images of one prompt, in their order.

    Its methods raise ``WorkflowError`` if an image cannot be read, or if text contains the image token.
    """

    def __init__(self, reader: ImageReader) -> None:
        from rollwright.inference.server.images import Gallery

        self._reader, self._gallery = reader, Gallery(reader, None)

    def as_texts(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with text for their images. Sampled image tokens of the assistant have no image, and are left out."""
        return [self._as_text(message) for message in messages]

    def _as_text(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, list):
            parts = [part["text"] if part["type"] == "text" else self._seen(part) for part in content]
            return {**message, "content": "".join(parts)}
        if message.get("role") == "assistant" and content:
            return {**message, "content": content.replace(self._reader.token, "")}
        return dict(message)

    def inputs(self, ids: list[int]) -> dict[str, Any]:
        """Return the fields of ``ModelRequest`` for the images of a prompt."""
        return self._refusing(self._gallery.inputs, ids)

    def _seen(self, part: dict[str, Any]) -> str:
        return self._refusing(self._gallery.add, part, "the image")

    def _refusing(self, read: Any, *arguments: Any) -> Any:
        from rollwright.inference.server.exchange import RequestError

        try:
            return read(*arguments)
        except RequestError as refusal:
            raise WorkflowError(str(refusal)) from refusal
