"""``rollwright model``: make models."""

from __future__ import annotations

from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def model() -> None:
    """Make models."""


@app.command()
def new(
    directory: Annotated[str, typer.Argument(help="Directory to write the model to; it must be empty or new.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value]...",
            help="Keys of a model stage, such as `layers=6` or `pieces=['<answer>','</answer>']`.",
            show_default=False,
        ),
    ] = None,
    architecture: Annotated[str | None, typer.Option(help="qwen3, qwen2, llama or qwen2_vl (which sees).")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None,
    layers: Annotated[int | None, typer.Option(help="Transformer blocks.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    characters: Annotated[str | None, typer.Option(help="Characters of the tokenizer; else printable ASCII.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer directory or name to take over instead.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the weights.")] = None,
) -> None:
    """Write a model with random weights and its tokenizer, in Hugging Face form.

    The same keys make a model stage of a config; `rollwright config schema --class rollwright.config.experiment.NewModelConfig`
    lists them all.
    """
    from pathlib import Path

    from rollwright.config.experiment import NewModelConfig
    from rollwright.config.loading import build_config, dump_yaml
    from rollwright.config.source import parse_yaml
    from rollwright.errors import ConfigError

    options: dict[str, Any] = {
        "architecture": architecture,
        "hidden_size": hidden_size,
        "layers": layers,
        "heads": heads,
        "characters": characters,
        "vocabulary_from": tokenizer,
        "seed": seed,
    }
    given = {"path": directory, **{key: value for key, value in options.items() if value is not None}}
    config = build_config(parse_yaml(dump_yaml(given), file="command line"), settings or [], NewModelConfig)
    place = Path(config.path)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(f"{place} exists and is not an empty directory; choose another, nothing is overwritten.")
    from rollwright.trainers.stages import make_model

    make_model(config)
