"""``rollwright run`` and ``rollwright eval``: carry out a config, or score a model."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rollwright.cli.examples import find_config, shipped_examples
from rollwright.cli.failures import keep_tracebacks_in
from rollwright.cli.sweep import Sweep, carry_out_sweep, end_with_sweep
from rollwright.config.loading import Stage, load_eval_stages, load_stages, split_arguments
from rollwright.config.plan import describe, resolved_yaml, run_directory_of
from rollwright.config.servers import is_endpoint
from rollwright.config.sweeps import members_of
from rollwright.errors import ConfigError
from rollwright.processes.tree import AGENT, die_with_parent
from rollwright.registry import PLUGINS

ConfigOption = Annotated[str | None, typer.Option("--config", help="The YAML file, in place of the first argument.")]
PluginDirectories = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin-dir",
        help="Python file, or directory of such, that registers workflows, rewards, losses and so on; repeatable.",
    ),
]


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [key=value]...",
            help="A YAML file or the name of an example, then keys that override it.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    plugin_dir: PluginDirectories = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the resolved config and what would happen, after reading the datasets and looking for the models; run nothing.",
        ),
    ] = False,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="Run once with each of these seeds, such as 1,2,3, and print means and intervals."),
    ] = None,
) -> None:
    """Carry out a config: one stage, or each of its stages in order.

    Keys are dotted paths, values are YAML: `actor.optimizer.lr=1e-5`, `gconfig.stop=['</answer>']`, `valid_dataset=null`. In a file
    with stages, a key applies to every stage that has it, and `stages.NAME.key=value` to one stage.

    Several values, `actor.optimizer.lr=1e-4,3e-4`, are a sweep: every combination is run, one after another, also with `--seeds 1,2,3`.
    Each run has its own trial. The end is a table of means and 95 % intervals over the seeds (docs/sweeps.md).

    Everything that the run writes is in `<cluster.fileroot>/<experiment_name>/<trial_name>/`. Running the same command again
    after an interruption continues where it stopped (recover.mode).
    """
    end_with_sweep()
    _spare_a_busy_machine()
    given = _words(config, arguments)
    file, overrides = split_arguments(given)
    file = find_config(file)
    options = [word for path in plugin_dir or () for word in ("--plugin-dir", str(path))]
    if members := members_of(overrides, seeds):
        sweep = Sweep(file, members, lambda file, words: load_with_plugins(file, words, plugin_dir), options)
        for each in sweep.runs:
            look_up_names(each.stages)
        return carry_out_sweep(sweep, dry_run)
    stages = load_with_plugins(file, overrides, plugin_dir)
    from rollwright.placement.placement import placement_of_stages
    from rollwright.placement.rank_processes import training_configs

    placement = placement_of_stages(stages)
    words = ["run", *options, *given]
    if dry_run:
        look_up_names(stages)
        from rollwright.trainers.checks.missing_inputs import refuse_missing_inputs

        refuse_missing_inputs(stages)
        typer.echo("\n".join([resolved_yaml(stages), describe(stages), *placement.show(stages, words)]))
        return
    if os.environ.get("RANK", "0") == "0":
        if placement.inputs_are_here:
            from rollwright.trainers.checks.missing_inputs import refuse_missing_files

            refuse_missing_files(stages)
        for trained in training_configs(stages):
            placement.check(trained)
    look_up_names(stages)
    if (status := placement.start(words, run_directory_of(stages))) is not None:
        raise typer.Exit(status)
    _carry_out(stages, file)


def _spare_a_busy_machine() -> None:
    """Make waiting compute threads yield on a busy machine. By default they spin, which makes steps many times slower.

    torch reads ``OMP_WAIT_POLICY`` when it is loaded; a value that the user has set is kept.
    """
    processors = os.cpu_count() or 1
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > processors and "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def evaluate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TASKS | CONFIG] [key=value]...",
            help="A dataset; or a config file or example, whose eval stages are carried out (without any, an evaluation is built from its "
            "shared keys). key=value overrides keys.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model directory, Hugging Face name, or URL of an endpoint of the OpenAI chat protocol."),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="Name of the model at the URL; default: the only one listed there.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="ROLLWRIGHT_API_KEY", help="Key for the URL.")] = None,
    dataset: Annotated[str | None, typer.Option(help="The dataset; for use with a config file.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the dataset.")] = None,
    workflow: Annotated[str | None, typer.Option(help="Import path or registered name of the workflow.")] = None,
    reward: Annotated[str | None, typer.Option(help="Import path or registered name of the reward function.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=0, help="Sampled completions of each task, in addition to the greedy one.")
    ] = None,
) -> None:
    """Score a model on tasks: a greedy completion of each task and, with --samples, sampled ones; pass@k and 95 % intervals.

    Example: `rollwright eval arithmetic --model runs/quickstart/first/model --reward arithmetic_reward --samples 8`. TASKS is a registered
    dataset, a file, a directory or a Hugging Face name. With a config file or the name of an example, its eval stages are carried out;
    options override their keys. The samples are recorded, and `rollwright view` shows them.
    """
    _spare_a_busy_machine()
    words = _words(config, arguments)
    file, overrides = split_arguments(words) if any("=" not in word for word in words) else (None, words)
    if config is None and file is not None and _is_dataset(file):
        if dataset is not None:
            raise ConfigError(f"The tasks are named twice: {file} and --dataset {dataset}. Name one.")
        file, dataset = None, file
    options = {
        "path": model,
        "served_model": served_model,
        "dataset.path": dataset,
        "dataset.split": split,
        "workflow": workflow,
        "reward_fn": reward,
        "samples": samples,
    }
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    stages = load_eval_stages(None if file is None else find_config(file), [*overrides, *given])
    for stage in stages:  # so that the directory of an earlier run is never reused
        stage.config.trial_name += time.strftime("-eval-%Y%m%d-%H%M%S")
        # Not as an override, which would be written to the run's directory.
        if api_key is not None and is_endpoint(stage.config.path):
            stage.config.api_key = api_key
    _carry_out(stages, file)


def _is_dataset(name: str) -> bool:
    """Return True if the first argument of ``eval`` is a dataset: neither a YAML file nor the name of an example."""
    return not name.endswith((".yaml", ".yml")) and name not in shipped_examples()


def _words(config: str | None, arguments: Sequence[str] | None) -> list[str]:
    """Return the command-line arguments that name a config and its overrides."""
    return [*(["--config", config] if config else []), *(arguments or [])]


def load_with_plugins(file: str, overrides: Sequence[str], plugins: Sequence[Path] | None) -> list[Stage]:
    """Load a config's stages after adding plugins for this process and its children."""
    for plugin in plugins or ():
        PLUGINS.add(plugin)
    return load_stages(file, overrides)


def look_up_names(stages: Sequence[Stage]) -> None:
    """Raise an error for workflows, rewards, operators and so on that cannot be found, even in plugins."""
    from rollwright.trainers.checks.unknown_names import refuse_unknown_names

    PLUGINS.load()
    refuse_unknown_names(stages)


def _carry_out(stages: list[Stage], file: str | None) -> None:
    if name := os.environ.get("TORCHELASTIC_RUN_ID"):  # the parent is torchelastic's agent, which may have ended already
        die_with_parent(int(name.removeprefix(AGENT)) if name.startswith(AGENT) else None)
    keep_tracebacks_in(run_directory_of(stages) / "logs")
    from rollwright.trainers.stages import run_config

    if status := run_config(stages, source_path=Path(file) if file else None):
        raise typer.Exit(status)
