"""Offline runs of Weights & Biases, which ``wandb sync`` uploads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from rollwright.errors import ConfigError
from rollwright.viewer.exports import Exported, metric_records, write_jsonl
from rollwright.viewer.run import Run

_ROWS = 10_000  # of a table, which is what W&B shows of one
_COLUMNS = ("key", "step", "status", "reason", "reward", "advantage", "tokens", "prompt", "answer")


def write_wandb(run: Run, directory: Path) -> Exported:
    """Write an offline run with the metrics, the config, the samples as tables, and all files of ``write_jsonl``.

    Raises:
        ConfigError: wandb is not installed.
    """
    try:
        import wandb
    except ModuleNotFoundError:
        raise ConfigError("--to wandb needs the package wandb: pip install 'rollwright[wandb]'.") from None
    quiet = wandb.Settings(
        silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
    )
    project, _, name = run.name.partition("/")
    opened = wandb.init(
        project=project,
        name=name or project,
        id=run.name.replace("/", "-"),
        dir=str(directory),
        mode="offline",
        job_type=run.kind,
        config=run.config,
        settings=quiet,
        reinit="create_new",
    )
    steps = 0
    try:
        for record in _by_step(run):
            step = record.pop("step")
            opened.log({**record, "_timestamp": record.get("unix_time", 0.0)}, step=step)
            steps += 1
        files = Path(opened.dir) / "rollwright"
        files.mkdir()
        write_jsonl(run, files)
        opened.save(str(files / "*"), base_path=opened.dir, policy="end")
        samples, number = _sample_rows(files / "samples.jsonl"), 0
        while some := list(islice(samples, _ROWS)):
            number += 1
            table = wandb.Table(columns=list(_COLUMNS), data=some)
            opened.log({f"tables/samples-{number}": table})
    finally:
        opened.finish()
        wandb.teardown()  # the process that writes the file ends, and with it the file is complete
    offline = Path(opened.dir).parent
    return Exported(run.path, [offline], f"{steps:,} steps; `wandb sync {offline}` uploads it")


def _by_step(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each step, those of its evaluation with it; a number that is not finite is nan."""
    current: dict[str, Any] = {}
    for record in metric_records(run):
        if current and record["step"] != current["step"]:
            yield current
            current = {}
        current |= {name: float("nan") if value is None else value for name, value in record.items()}
    if current:
        yield current


def _sample_rows(file: Path) -> Iterator[Any]:
    if not file.exists():
        return
    with file.open(encoding="utf-8") as lines:
        for sample in map(json.loads, lines):
            yield [
                sample["key"],
                sample["step"],
                sample["status"],
                sample["reason"],
                sample["reward"],
                sample["advantage"],
                sample["tokens"],
                "\n".join(message["text"] for message in takewhile(_is_given, sample.get("messages", []))),
                next((message["text"] for message in reversed(sample.get("messages", [])) if not _is_given(message)), ""),
            ]


def _is_given(message: Mapping[str, Any]) -> bool:
    return message["role"] != "assistant"
