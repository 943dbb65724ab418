"""Images in the messages of ``ModelWrapper.chat``, for models that read them.

The images are read as the servers read them (``inference.server.images``), which needs the extra ``openai``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollwright.errors import ConfigError, WorkflowError


@functools.lru_cache(maxsize=4)
def images_of_chat(tokenizer: Any) -> ChatImages | None:
    """Return what reads the images of a model's chats, or None if there is no image processor in its tokenizer's directory."""
    directory = getattr(tokenizer, "name_or_path", "") or ""
    sees = bool(directory) and (Path(directory) / "preprocessor_config.json").is_file()
    return ChatImages(tokenizer) if sees else None


class ChatImages:
    """Reads the images of a model's chats.

    Attributes:
        token_id: id of the token that represents images in a prompt.

    Raises:
        ConfigError: the extra ``openai`` is missing.
    """

    def __init__(self, tokenizer: Any) -> None:
        try:
            from rollwright.inference.server.images import ImageReader
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"chats of a model that reads images need the package {error.name}: pip install 'rollwright[openai]'."
            ) from error
        self._reader = ImageReader(tokenizer)
        self.token_id = int(self._reader.token_id or 0)

    def gallery(self) -> ChatGallery:
        """Return the empty gallery of one prompt."""
        return ChatGallery(self._reader)


class ChatGallery:
    """The images of one prompt, in their order.

    Its methods raise ``WorkflowError`` if an image cannot be read, or if text contains the image token.
    """

    def __init__(self, reader: Any) -> None:
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
