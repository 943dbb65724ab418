"""``rollwright run``: carry out a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollwright.cli.plugins import PluginDirectories, announce_plugins, look_up_names


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [key=value]...", help="A YAML file, then keys that win over it.", show_default=False),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="The YAML file, in place of the first argument.")] = None,
    plugin_dir: PluginDirectories = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and what would happen, and do nothing.")
    ] = False,
) -> None:
    """Carry out a config: one stage, or each of its stages in order.

    Keys are dotted paths, values are YAML: actor.optimizer.lr=1e-5, gconfig.stop=['</answer>'], valid_dataset=null. In a file
    with stages, a key reaches every stage that has it, and stages.NAME.key=value one stage alone.

    Everything that the run writes is in <cluster.fileroot>/<experiment_name>/<trial_name>/. Running the same command again
    after an interruption goes on where it stopped (recover.mode).
    """
    from rollwright.cli.failures import keep_tracebacks_in
    from rollwright.cli.plan import describe, resolved_yaml, run_directory_of
    from rollwright.config.loading import load_stages, split_arguments

    announce_plugins(plugin_dir)
    file, overrides = split_arguments([*(["--config", config] if config else []), *(arguments or [])])
    stages = load_stages(file, overrides)
    if dry_run:
        look_up_names(stages)
        typer.echo(resolved_yaml(stages))
        typer.echo(describe(stages))
        return
    keep_tracebacks_in(run_directory_of(stages) / "logs")
    from rollwright.trainers.stages import run_config

    status = run_config(stages, source_path=Path(file))
    if isinstance(status, int) and status:
        raise typer.Exit(status)
