"""``rollwright export``: merge a LoRA adapter with its base, for programs that take whole models only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rollwright.errors import CheckpointError, ConfigError

#: llama.cpp's converter, and the variable that names a checkout of llama.cpp.
_CONVERTER, _CHECKOUT = "convert_hf_to_gguf.py", "LLAMA_CPP_DIR"


class ExportType(StrEnum):
    """Type of the merged weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def export(
    checkpoint: Annotated[Path, typer.Argument(help="The adapter's directory (adapter_config.json).")],
    directory: Annotated[Path, typer.Argument(help="Directory for the merged model; it must be empty or new.")],
    dtype: Annotated[
        ExportType, typer.Option(help="Type of the merged weights. For bfloat16, the change of log-probabilities is measured.")
    ] = ExportType.float32,
    base: Annotated[str | None, typer.Option(help="Base model; default: the one that adapter_config.json names.")] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(help="Also write this GGUF file, in 16 bits for bfloat16 and 32 for float32; needs llama.cpp."),
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the base model.")] = False,
) -> None:
    """Merge an adapter into its base, in float32 arithmetic, and write a model in Hugging Face form with the adapter's tokenizer."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty directory; choose another, nothing is overwritten.")
    converter = _converter() if gguf is not None else None
    from rollwright.training.export import merge

    change = merge(checkpoint, directory, dtype.value, base, trust_remote_code=trust_remote_code)
    print(f"wrote {directory}: the adapter merged into its base, in {dtype.value}")
    if change is not None:
        print(
            f"rounding to bfloat16 changes the log-probabilities of {change.tokens} sampled tokens by {change.mean:.2e} on average, "
            f"{change.largest:.2e} at most"
        )
    if converter is not None and gguf is not None:
        _convert(converter, directory, gguf, "f32" if dtype is ExportType.float32 else "bf16")
        print(f"wrote {gguf}")


def _converter() -> str:
    """Return the path of llama.cpp's converter.

    Raises:
        ConfigError: it is not installed.
    """
    checkout = os.environ.get(_CHECKOUT)
    found = shutil.which(_CONVERTER, path=checkout, mode=os.F_OK) if checkout else shutil.which(_CONVERTER, mode=os.F_OK)
    if found is None:
        where = f"in {checkout} ({_CHECKOUT})" if checkout else "on PATH"
        raise ConfigError(
            f"--gguf needs llama.cpp's {_CONVERTER}, which is not {where}: git clone https://github.com/ggml-org/llama.cpp, pip install "
            f"gguf, and set {_CHECKOUT} to the checkout. Without --gguf, the merged model is written for a converter of your own."
        )
    return found


def _convert(converter: str, model: Path, file: Path, kind: str) -> None:
    command = [sys.executable, converter, str(model), "--outfile", str(file), "--outtype", kind]
    ended: Any = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = (ended.stderr or ended.stdout).strip().splitlines()
        raise CheckpointError(
            f"llama.cpp could not convert {model} ({lines[-1] if lines else f'exit status {ended.returncode}'}): {' '.join(command)}"
        )
