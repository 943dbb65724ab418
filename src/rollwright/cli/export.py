"""``rollwright export``: a run for other programs, or a LoRA adapter merged with its base for those that take whole models only."""

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
from rollwright.tracking.run_directory import MARKER

#: llama.cpp's converter, and the variable that names a checkout of llama.cpp.
_CONVERTER, _CHECKOUT = "convert_hf_to_gguf.py", "LLAMA_CPP_DIR"


class ExportType(StrEnum):
    """Type of the merged weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Format(StrEnum):
    """Format in which a run is exported."""

    inspect = "inspect"
    wandb = "wandb"
    jsonl = "jsonl"


def export(
    source: Annotated[Path, typer.Argument(help="The run, or a stage of it; or the directory of an adapter.")],
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Destination; it must be empty or new. Default for a run: exports/RUN-FORMAT. An adapter needs one."
        ),
    ] = None,
    dtype: Annotated[
        ExportType | None,
        typer.Option(
            help="Type of the merged weights, by default float32. For bfloat16, the change of log-probabilities is measured."
        ),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Base model; default: the one that adapter_config.json names.")] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(help="Also write this GGUF file, in 16 bits for bfloat16 and 32 for float32; needs llama.cpp."),
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the base model.")] = False,
    to: Annotated[
        Format | None,
        typer.Option(help="Export a run: as logs for Inspect, as offline runs for Weights & Biases, or as JSON lines."),
    ] = None,
) -> None:
    """Export a run for other programs, with --to; or merge a LoRA adapter into its base.

    The export of a run contains all that is in its journal and metrics: samples, tokens, rewards, curves. The command names what the
    format cannot hold. An adapter is merged in float32 arithmetic, and written as a model in Hugging Face form with the adapter's tokenizer.
    """
    if to is not None:
        if dtype is not None or base is not None or gguf is not None or trust_remote_code:
            raise ConfigError("--to exports a run: --dtype, --base, --gguf and --trust-remote-code are for adapters.")
        _export_run(source, directory, to)
        return
    if directory is None or (source / MARKER).exists():
        raise ConfigError(
            "to export a run, say to what: rollwright export RUN --to inspect (or wandb, jsonl); to merge an adapter, give its "
            "directory and that of the merged model: rollwright export ADAPTER DIRECTORY."
        )
    _merge(source, directory, dtype or ExportType.float32, base, gguf, trust_remote_code)


def _export_run(source: Path, directory: Path | None, to: Format) -> None:
    from rollwright.viewer.exports import export_run, write_jsonl
    from rollwright.viewer.inspect_log import write_inspect
    from rollwright.viewer.wandb_export import write_wandb

    write = {Format.inspect: write_inspect, Format.wandb: write_wandb, Format.jsonl: write_jsonl}[to]
    name = "-".join(source.resolve().parts[-2:])
    place = directory or Path("exports") / f"{name}-{to}"
    for part in export_run(source, place, write):
        typer.echo(f"{part.path}: {part.about}")
        if part.left_out:
            typer.echo(f"  not in this format: {part.left_out}; --to jsonl has them")
    typer.echo(f"wrote {place}" + (f": inspect view --log-dir {place}" if to is Format.inspect else ""))


def _merge(
    checkpoint: Path, directory: Path, dtype: ExportType, base: str | None, gguf: Path | None, trust_remote_code: bool
) -> None:
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
