"""``rollwright plan``: what a run takes on GPUs, before there are any."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from rollwright.config.loading import load_stages, split_arguments
from rollwright.errors import ConfigError

if TYPE_CHECKING:
    from rollwright.config.experiment import PPOConfig
    from rollwright.placement.memory_plan import ModelShape, Plan


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [key=value]...", help="A YAML file and keys that override it.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Directory, name on the Hub, or a shape such as llama:hidden_size=8192,num_hidden_layers=80."),
    ] = None,
    gpus: Annotated[str, typer.Option(help="Number of GPUs of the node, and GB of each.")] = "8x80",
) -> None:
    """Show the memory of each process, which GPU it uses, and how long a publication takes. Starts nothing and needs no GPU.

    Without a config, it shows every division of the GPUs between trainer and servers. With a config, or with keys, it shows that run
    alone. Exits with 1 if the run does not fit.
    """
    from rollwright.cli.examples import find_config
    from rollwright.placement.memory_plan import GB, described, plan_of, shape_of, splits

    if not (match := re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", gpus)) or not int(match[1]):
        raise ConfigError(f"--gpus {gpus}: write the number of GPUs and the GB of each, such as 8x80.")
    count, size = int(match[1]), float(match[2]) * GB
    words = arguments or []
    file, overrides = split_arguments(words) if any("=" not in word for word in words) else (None, words)
    config = _config(find_config(file) if file else None, overrides)
    if not (name := model or config.actor.path):
        raise ConfigError("no model is named: give --model, or a config with actor.path.")
    shape = shape_of(name)
    if file or overrides:
        chosen = plan_of(config, shape, count, size)
        typer.echo("\n".join(described(chosen, shape, size)))
    else:
        plans = list(splits(config, shape, count, size))
        _show_splits(plans, shape)
        fitting = [each for each in plans if not each.faults]
        chosen = max(fitting, key=lambda each: each.config.cluster.processes) if fitting else None
        if chosen is not None:
            typer.echo("\n".join(["", "With the most ranks:", *described(chosen, shape, size)]))
    if chosen is None or chosen.faults:
        raise typer.Exit(1)


def _config(file: str | None, overrides: list[str]) -> PPOConfig:
    from rollwright.config.experiment import PPOConfig
    from rollwright.config.loading import build_config
    from rollwright.config.source import Document

    if file is None:
        return build_config(
            Document({}), ["rollout.backend=sglang", "actor.gradient_checkpointing=true", *overrides], PPOConfig
        )
    stages = [stage.config for stage in load_stages(file, overrides) if isinstance(stage.config, PPOConfig)]
    if not stages:
        raise ConfigError(f"{file} has no stage of kind rl, whose memory could be planned.")
    return stages[-1]


def _show_splits(plans: list[Plan], shape: ModelShape) -> None:
    from rich.table import Table

    from rollwright.placement.memory_plan import GB, rank_memory
    from rollwright.tracking.logging import console

    table = Table(box=None, pad_edge=False)
    for name in ("ranks", "servers", "GPUs of each", "GB of a rank", "tokens in a server's cache", "fits"):
        table.add_column(name, justify="right")
    for each in plans:
        config = each.config
        table.add_row(
            str(config.cluster.processes),
            str(config.rollout.servers),
            str(config.rollout.tensor_parallel),
            f"{sum(rank_memory(config, shape).values()) / GB:.1f}",
            f"{each.tokens:,.0f}",
            "[red]no[/]" if each.faults else "[green]yes[/]",
        )
    console().print(f"{shape.parameters / 1e9:.2f} billion parameters, {shape.layers} layers")
    console().print(table)
    if plans and all(each.faults for each in plans):
        console().print(f"Nothing fits: {'; '.join(plans[0].faults)}.")
    if not plans:
        console().print(
            "There is no division: trainer and servers need a GPU each. Let them take turns on one with rollout.colocate=true."
        )
