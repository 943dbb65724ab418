"""``rollwright config``: show, check and describe configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rollwright.cli.examples import find_config
from rollwright.cli.run import PluginDirectories, load_with_plugins, look_up_names
from rollwright.config.loading import load_stages, split_arguments
from rollwright.config.plan import describe, resolved_yaml
from rollwright.config.schema import class_at, schema_of_class, schema_of_files

app = typer.Typer(no_args_is_help=True)

Arguments = Annotated[
    list[str], typer.Argument(metavar="CONFIG [key=value]...", help="A YAML file, then keys that override it.")
]


@app.command()
def show(arguments: Arguments) -> None:
    """Print a config with every key and the value it has after overrides and interpolation."""
    file, overrides = split_arguments(arguments)
    typer.echo(resolved_yaml(load_stages(find_config(file), overrides)))


@app.command()
def check(arguments: Arguments, plugin_dir: PluginDirectories = None) -> None:
    """Check a config: exit with 0 if it can run, else list every fault with its key, file and line.

    Workflows, rewards and operators are looked up by their names, as a run would; models and data are not.
    """
    file, overrides = split_arguments(arguments)
    stages = load_with_plugins(find_config(file), overrides, plugin_dir)
    look_up_names(stages)
    typer.echo(f"{file}: nothing is wrong.{describe(stages)}")


@app.command()
def schema(
    class_name: Annotated[
        str | None,
        typer.Option("--class", help="Import path of a config dataclass, such as rollwright.GRPOConfig or my.module.MyConfig."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write to; else it is printed.")] = None,
) -> None:
    """Write the JSON Schema of config files, with which editors complete keys and show their help.

    In VS Code with the YAML extension, begin a file with `# yaml-language-server: $schema=rollwright.schema.json`.
    """
    text = json.dumps(schema_of_class(class_at(class_name)) if class_name else schema_of_files(), indent=2)
    if output:
        output.write_text(text + "\n", encoding="utf-8")
        typer.echo(f"wrote {output}")
    else:
        typer.echo(text)
