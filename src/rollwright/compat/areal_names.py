"""Functions with AReaL's names and arguments, if those of this project differ."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from rollwright.config.tasksets import DatasetConfig
from rollwright.data.datasets import get_dataset
from rollwright.data.formats import Row
from rollwright.data.tokenizer import load_tokenizer
from rollwright.data.vision import as_images, encoded_image, load_processor
from rollwright.errors import ConfigError, DataError
from rollwright.registry import import_path, nearest
from rollwright.tracking import logging

logger = logging.getLogger("compat")


def load_hf_tokenizer(model_name_or_path: str, fast_tokenizer: bool = True, padding_side: str | None = None) -> Any:
    """Call ``load_tokenizer`` with AReaL's arguments. Code that comes with a tokenizer is not run.

    Raises:
        ConfigError: the tokenizer is not found, or a slow one is requested.
    """
    if not fast_tokenizer:
        raise ConfigError("load_hf_tokenizer(fast_tokenizer=False): only fast tokenizers are loaded; leave the argument out.")
    tokenizer = load_tokenizer(model_name_or_path)
    if padding_side is not None:
        tokenizer.padding_side = padding_side
    return tokenizer


def load_hf_processor_and_tokenizer(
    model_name_or_path: str, fast_tokenizer: bool = True, padding_side: str | None = None
) -> tuple[Any, Any]:
    """Load the processor and tokenizer by directory or name; the processor is None if the model takes no images."""
    tokenizer = load_hf_tokenizer(model_name_or_path, fast_tokenizer, padding_side)
    try:
        return load_processor(model_name_or_path, tokenizer), tokenizer
    except ConfigError as error:
        logger.warning("%s has no processor of images: %s", model_name_or_path, error)
        return None, tokenizer


def get_custom_dataset(
    split: str | None = None,
    dataset_config: DatasetConfig | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    **section: Any,
) -> list[Row]:
    """Call ``get_dataset`` with AReaL's arguments.

    Args:
        split: overrides the section's split.
        dataset_config: the section. If None, it is built from ``section`` (``path``, ``type``, ``max_length``, …).
        tokenizer, processor: one of them counts a prompt's tokens, if ``max_length`` is set.
        rank, world_size: select the rows of one of several processes.
        **section: keys of a dataset section; they override those of ``dataset_config``.

    Raises:
        DataError: as in ``get_dataset``, or a key in ``section`` is unknown.
    """
    if unknown := sorted(section.keys() - {field.name for field in fields(DatasetConfig)}):
        raise DataError(
            f"get_custom_dataset({unknown[0]}=…): {nearest(unknown[0], [field.name for field in fields(DatasetConfig)])}"
        )
    changes = section if split is None else {"split": split, **section}
    config = DatasetConfig(**changes) if dataset_config is None else replace(dataset_config, **changes)
    return get_dataset(config, tokenizer if tokenizer is not None else processor)[rank::world_size]


def image2base64(images: Any) -> list[str]:
    """Encode images as base64 text of PNG files; one image gives a list of one."""
    return [encoded_image(image).rpartition(",")[2] for image in as_images(images)]


def import_from_string(module_path: str) -> Any:
    """Import ``package.module.name``; see ``import_path``."""
    return import_path(module_path, "object")
