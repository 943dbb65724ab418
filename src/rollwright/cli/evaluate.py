"""``rollwright eval``: score a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [key=value]...",
            help="A file whose eval stages are carried out (or whose shared keys an evaluation is made of), and keys that win.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="The YAML file, in place of the first argument.")] = None,
    model: Annotated[str | None, typer.Option(help="Model directory or Hugging Face name.")] = None,
    dataset: Annotated[str | None, typer.Option(help="File, directory, registered dataset or Hugging Face name.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the dataset.")] = None,
    workflow: Annotated[str | None, typer.Option(help="Import path or registered name of the workflow.")] = None,
    reward: Annotated[str | None, typer.Option(help="Import path or registered name of the reward function.")] = None,
    samples: Annotated[int | None, typer.Option(min=0, help="Sampled completions of each task beside the greedy one.")] = None,
) -> None:
    """Score a model on a dataset: one greedy completion of each task, and the mean of several samples beside it.

    Without a file: `rollwright eval --model runs/quickstart/first/model --dataset arithmetic --reward arithmetic_reward --samples 8`. With one:
    its eval stages are carried out, and the options win over what they say.
    """
    import time

    from rollwright.cli.failures import keep_tracebacks_in
    from rollwright.cli.plan import run_directory_of
    from rollwright.config.loading import load_eval_stages, split_arguments

    options = {
        "path": model,
        "dataset.path": dataset,
        "dataset.split": split,
        "workflow": workflow,
        "reward_fn": reward,
        "samples": samples,
    }
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    words = [*(["--config", config] if config else []), *(arguments or [])]
    file, overrides = split_arguments(words) if any("=" not in word for word in words) else (None, words)
    stages = load_eval_stages(file, [*overrides, *given])
    for stage in stages:  # a run's own directory is never written to again
        stage.config.trial_name += time.strftime("-eval-%Y%m%d-%H%M%S")
    keep_tracebacks_in(run_directory_of(stages) / "logs")
    from rollwright.trainers.stages import run_config

    status = run_config(stages, source_path=Path(file) if file else None)
    if status:
        raise typer.Exit(status)
