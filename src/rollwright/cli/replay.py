"""``rollwright replay``: run recorded episodes again, without a model."""

from __future__ import annotations

import json
import pdb
import time
from pathlib import Path
from typing import Annotated

import typer

from rollwright.errors import ConfigError

SHOWN = 20  # most episodes that differ to print, one line each


def replay(
    run: Annotated[Path, typer.Argument(help="The directory of the run, or of a stage of it.")],
    sample: Annotated[
        str,
        typer.Argument(help="ORDINAL/SAMPLE, ORDINAL for all samples of a task, eval:ORDINAL, or all; see docs/durable.md."),
    ] = "all",
    workflow: Annotated[str | None, typer.Option(help="Run this workflow in place of the run's.")] = None,
    reward_fn: Annotated[
        str | None, typer.Option("--reward-fn", "--reward_fn", help="Score with this reward function in place of the run's.")
    ] = None,
    use_pdb: Annotated[bool, typer.Option("--pdb", help="Stop in the debugger where an episode fails or diverges.")] = False,
    sampled: Annotated[
        bool, typer.Option("--sample", help="Sample again with a model, in place of the journal's answers.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Model of --sample; the run's newest checkpoint, else the model it began with.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")] = None,
) -> None:
    """Run recorded episodes again, answered from the run's journal: no model, no sampling.

    Tokens, rewards and rows have to be the recorded ones; otherwise the command ends with 1 and says where they differ. With
    --reward-fn or --workflow changed code is run on recorded episodes.
    """
    from rollwright.tracking.logging import console
    from rollwright.trainers.modes.recorded_runs import RunReplay, journaled_directory

    if sampled and model is None:
        model = _newest_model(journaled_directory(run))
    started, counts, changed = time.monotonic(), {"equal": 0, "differs": 0, "failed": 0}, []
    before = after = rows = 0.0
    repeated = 0
    with RunReplay(run, workflow=workflow, reward_fn=reward_fn, model=model if sampled else None) as recorded:
        for each in recorded.replay(sample):
            counts[each.verdict] += 1
            repeated += each.repeats
            before, after, rows = before + sum(each.recorded_rewards), after + sum(each.rewards), rows + len(each.rewards)
            if each.verdict != "equal":
                changed.append({"sample": each.name, "verdict": each.verdict, "why": each.why})
                if len(changed) <= SHOWN:
                    console().print(f"{each.name} {each.verdict}: {each.why}", markup=False)
                if use_pdb and each.error is not None:
                    pdb.post_mortem(each.error.__traceback__)
            elif sample != "all":
                console().print(f"{each.name}: reward {each.rewards}, recorded {each.recorded_rewards}", markup=False)
    total, seconds = sum(counts.values()), time.monotonic() - started
    if not total:
        raise ConfigError(
            f"the journal of {run} has no finished episode {sample}: name another ORDINAL/SAMPLE, an ordinal, eval:ORDINAL, or all."
        )
    means = {"recorded": before / rows, "now": after / rows} if rows else {}
    told = ", ".join(f"mean reward {name} {value:.4f}" for name, value in means.items())
    said = f"{total} episodes in {seconds:.1f} s: {', '.join(f'{n} {name}' for name, n in counts.items())}; {told}"
    console().print(said, soft_wrap=True)
    if sampled:
        console().print(f"{repeated} of {total} have the recorded tokens")
    if json_file is not None:
        content = {
            "episodes": total,
            **counts,
            **({"repeated": repeated} if sampled else {}),
            "seconds": seconds,
            "mean_reward": means,
            "changed": changed,
        }
        json_file.write_text(json.dumps(content, indent=2) + "\n")
    if counts["equal"] < total:
        raise typer.Exit(1)


def _newest_model(directory: Path) -> str:
    from rollwright.inference.weights.adapter import CONFIG_FILE
    from rollwright.trainers.modes.recorded_runs import load_run_config

    found = [file for name in ("config.json", CONFIG_FILE) for file in (directory / "checkpoints").glob(f"*/{name}")]
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return load_run_config(directory).actor.path if newest is None else str(newest.parent)
