"""Writing directories whole or not at all, and models in Hugging Face form."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def replaced_directory(directory: str | Path, *, before_visible: Callable[[], object] | None = None) -> Iterator[Path]:
    """A directory to fill that takes the place of ``directory`` when the block ends without an exception.

    It is written beside the target and renamed, after its files have reached the disk, so that a reader (or a run that is
    killed half-way) sees the old directory or the new one, never a part.

    Args:
        directory: the target.
        before_visible: called when the files are on the disk, just before they can be seen under the target's name; where
            it raises, nothing appears.
    """
    target = Path(directory).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    draft.mkdir()
    try:
        yield draft
        for path in draft.rglob("*"):
            _flush(path)
        _flush(draft)
        if before_visible is not None:
            before_visible()
        if target.exists():
            old = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.old"
            target.rename(old)
            draft.rename(target)
            shutil.rmtree(old)
        else:
            draft.rename(target)
        _flush(target.parent)
    finally:
        if draft.exists():
            shutil.rmtree(draft, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars out of a run's own display."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def owned_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors as contiguous CPU copies that own their memory.

    Parameters that are views into fused projections would be taken for shared tensors by the writers of safetensors.
    Tied parameters stay tied: they are one object in the result.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in copies or tensor.numel() == 0:
            copies[key] = tensor.detach().to("cpu", copy=True).contiguous()
        state[name] = copies[key]
    return state


def save_model(
    model: nn.Module,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    image_processor: Any = None,
    state: dict[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model (and tokenizer) so that ``from_pretrained`` loads it; the directory appears whole or not at all.

    Args:
        model: a Hugging Face model.
        directory: replaced where it exists.
        tokenizer: its files and chat template are written too.
        image_processor: of a model that sees; its file is written too.
        state: the tensors to write; None: the model's own.
        dtype: type that floating-point tensors are written in; None: as they are.
    """
    state = owned_state(model) if state is None else state
    if dtype is not None:
        converted = {id(tensor): tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in state.values()}
        state = {name: converted[id(tensor)] for name, tensor in state.items()}
    with replaced_directory(directory) as draft, without_progress_bars():
        model.save_pretrained(draft, state_dict=state)  # type: ignore[operator]
        if dtype is not None:
            _note_dtype(draft / "config.json", dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        if image_processor is not None:
            image_processor.save_pretrained(draft)


def _note_dtype(config_file: Path, dtype: torch.dtype) -> None:
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
