"""Images for vision models: their placeholders in prompts, and processors that need no torchvision.

An image is written into a prompt as ``<|vision_start|><|image_pad|><|vision_end|>``; the processor repeats the middle token
once for each feature that the model makes of the image.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import ConfigError, DataError
from rollwright.tracking import logging

logger = logging.getLogger("data")

VISION_START, IMAGE, VISION_END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"

#: Tokens that a tokenizer has for images, each one token.
VISION_PIECES = (VISION_START, IMAGE, VISION_END, VIDEO)

#: Mark of an image's position in a message's text.
MARK = "<image>"

#: First characters of a base64-encoded PNG, JPEG, GIF or WebP file, or of a ``data:`` URL.
_BASE64_BEGINNINGS = ("data:", "iVBOR", "/9j/", "R0lGOD", "UklGR")

#: Outputs of a processor that belong to the text, not to the images.
_TEXT_OUTPUTS = ("input_ids", "attention_mask", "mm_token_type_ids")


class VisionProcessor:
    """Converts text and images to inputs of Qwen-VL models; called like the processors of transformers.

    Args:
        tokenizer: has the image tokens.
        image_processor: image processor of transformers that returns ``pixel_values`` and ``image_grid_thw``.

    Raises:
        ConfigError: the tokenizer has no image token, or the image processor belongs to another model family.
    """

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.image_token = getattr(tokenizer, "image_token", None) or IMAGE
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        if self.image_token_id in (None, tokenizer.unk_token_id):
            raise ConfigError(f"the tokenizer has no token {self.image_token!r}, so no prompt can hold an image; give it one.")
        if not hasattr(image_processor, "merge_size"):
            raise ConfigError(
                f"{type(image_processor).__name__} has no merge_size: it is not of the Qwen-VL families. Pass the model's own "
                "processor (transformers.AutoProcessor; some need torchvision) as `processor`."
            )

    def __call__(
        self, images: Sequence[Any] | None = None, text: str | Sequence[str] = "", **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Process one prompt with its images.

        Args:
            images: PIL images in the order of their placeholders; None or empty for text alone.
            text: the prompt with one image token for each image, or a list with this one prompt.
            **kwargs: ``padding`` and ``return_tensors``, which change nothing for one prompt.

        Returns:
            ``input_ids``, ``attention_mask`` and ``mm_token_type_ids`` (1 at image tokens) ``[1, P]``; with images also ``pixel_values [patches, size]`` and
            ``image_grid_thw [images, 3]``.

        Raises:
            DataError: the number of image tokens differs from the number of images.
        """
        if not isinstance(text, str):
            (text,) = text
        images = list(images or [])
        parts = text.split(self.image_token)
        if len(parts) - 1 != len(images):
            raise DataError(f"the prompt has {len(parts) - 1} image tokens for {len(images)} images; write one for each.")
        outputs: dict[str, torch.Tensor] = {}
        if images:
            seen = self.image_processor(images=images, return_tensors="pt")
            outputs = {"pixel_values": seen["pixel_values"], "image_grid_thw": seen["image_grid_thw"]}
            counts = (seen["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist()
            text = parts[0] + "".join(self.image_token * count + part for count, part in zip(counts, parts[1:], strict=True))
        ids = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)], dtype=torch.int64)
        kinds = (ids == self.image_token_id).long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **outputs}

    def save_pretrained(self, path: str | Path) -> None:
        """Write tokenizer and image processor in Hugging Face form."""
        self.tokenizer.save_pretrained(path)
        self.image_processor.save_pretrained(path)


def reads_images(tokenizer: Any) -> bool:
    """Return True if the directory that a tokenizer came from has an image processor, so that its model reads images."""
    directory = getattr(tokenizer, "name_or_path", "") or ""
    return bool(directory) and (Path(directory) / "preprocessor_config.json").is_file()


def load_processor(path: str | Path | Any, tokenizer: Any = None) -> Any:
    """Load a processor by directory or name, without torchvision.

    Args:
        path: directory or name; a processor object is returned as it is.
        tokenizer: the tokenizer. If None, it is loaded from ``path``.

    Raises:
        ConfigError: there is no image processor, or its model family needs its own processor.
    """
    if not isinstance(path, (str, os.PathLike)):
        return path
    try:
        from transformers import AutoImageProcessor

        image_processor = AutoImageProcessor.from_pretrained(str(path))
    except (OSError, ValueError, ImportError) as error:
        cause = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"no image processor can be loaded from {path} (needs preprocessor_config.json and pillow): {cause}"
        ) from error
    return VisionProcessor(tokenizer if tokenizer is not None else load_tokenizer(str(path)), image_processor)


def new_image_processor(
    patch_size: int = 14, merge_size: int = 2, min_pixels: int = 56 * 56, max_pixels: int = 56 * 56 * 64
) -> Any:
    """Make an image processor for Qwen2-VL that needs only PIL and NumPy.

    Args:
        patch_size: side length of a patch in pixels.
        merge_size: number of patches per side that become one token.
        min_pixels, max_pixels: images are scaled to an area between these, with sides of whole tokens.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    return Qwen2VLImageProcessorPil(patch_size=patch_size, merge_size=merge_size, size=size)


def multi_modal_outputs(processed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a processor's outputs for the images, without those for the text; empty if there are no images."""
    return {key: torch.as_tensor(value) for key, value in processed.items() if key not in _TEXT_OUTPUTS}


def image_inputs(processor: Any, images: Any) -> dict[str, torch.Tensor]:
    """Compute the model inputs of images whose placeholders are already in the prompt."""
    return multi_modal_outputs(processor.image_processor(images=as_images(images), return_tensors="pt"))


def place_images(prompt: Any, count: int, placeholder: str) -> Any:
    """Write a placeholder for each image into a prompt.

    Args:
        prompt: text, or messages whose content is text or blocks (``{"type": "image"}``, ``{"type": "text", "text": …}``).
        count: number of images.
        placeholder: text that represents one image.

    Returns:
        The prompt with text contents only. Image blocks and ``<image>`` marks become placeholders. If there are neither marks nor
        placeholders, all images are put at the beginning of the user's first message.

    Raises:
        DataError: the number of image positions in the prompt is not ``count``.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [{**message, "content": _as_text(message.get("content"), placeholder)} for message in messages]
    if not any(placeholder in message["content"] for message in messages):
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        first["content"] = placeholder * count + first["content"]
    if (places := sum(message["content"].count(placeholder) for message in messages)) != count:
        raise DataError(
            f"the prompt has places for {places} images and the task has {count}; give as many as there are places."
        )
    return messages[0]["content"] if isinstance(prompt, str) else messages


def _as_text(content: Any, placeholder: str) -> str:
    if content is None or isinstance(content, str):
        return (content or "").replace(MARK, placeholder)
    kinds = [block.get("type") for block in content]
    if unknown := [kind for kind in kinds if kind not in ("text", "image", "image_url")]:
        raise DataError(f"a message has a content block of type {unknown[0]!r}; text and image are known.")
    return "".join(block["text"] if block["type"] == "text" else placeholder for block in content)


def image_placeholder(processor: Any) -> str:
    """Return the placeholder of one image in a processor's prompts."""
    token = getattr(processor, "image_token", None) or IMAGE
    vocabulary = processor.tokenizer.get_vocab()
    return f"{VISION_START}{token}{VISION_END}" if {VISION_START, VISION_END} <= vocabulary.keys() else token


def encoded_image(image: Any) -> str:
    """Encode a PIL image as a ``data:`` URL of a PNG, the form that servers accept; return a string (URL, base64) unchanged."""
    if isinstance(image, str):
        return image
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def as_images(images: Any, where: str = "the task") -> list[Any]:
    """Convert PIL images, encoded bytes, base64 text, files, or rows of Hugging Face's image feature (``{"bytes": …}``) to PIL images.

    Raises:
        DataError: an entry is none of these.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise DataError("images need the package pillow, which is not installed: pip install 'rollwright[vision]'.") from error

    opened: list[Any] = []
    for index, image in enumerate(images if isinstance(images, (list, tuple)) else [images]):
        if isinstance(image, Mapping):
            image = image.get("bytes") or image.get("path")
        try:
            if isinstance(image, str) and image.startswith(_BASE64_BEGINNINGS):
                image = base64.b64decode(image.rpartition(",")[2])
            if isinstance(image, bytes):
                image = Image.open(io.BytesIO(image))
            elif isinstance(image, (str, os.PathLike)):
                image = Image.open(image)
            if not isinstance(image, Image.Image):
                raise DataError(f"{where}: image {index} is {type(image).__name__}; give a PIL image, its bytes or its file.")
            opened.append(image.convert("RGB"))  # which decodes it
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{where}: image {index} cannot be read: {error}.") from error
    return opened
