"""``rollwright check-tasks``: prove task folders before training on them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer


def check_tasks(
    path: Annotated[Path, typer.Argument(help="A task folder, or a directory of them.")],
    sandbox: Annotated[str, typer.Option(help="Kind of box, as in rollout.sandbox.")] = "bubblewrap",
    at_once: Annotated[int | None, typer.Option(help="Tasks at the same time; default: one for each CPU.", min=1)] = None,
    reward_key: Annotated[str, typer.Option(help="Key of reward.json that is the reward.")] = "reward",
    network: Annotated[
        bool | None, typer.Option(help="Let tasks that ask for the network reach it, or run them without.")
    ] = None,
    host_env: Annotated[list[str] | None, typer.Option(help="Variable of this machine that tasks may take.")] = None,
    host_image: Annotated[
        list[str] | None, typer.Option(help="Image for which the system of this machine stands in, such as 'debian:*'.")
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Run tests in the agent's box if a task does not say where.")
    ] = False,
) -> None:
    """Check that in every task the reference solution scores 1 and doing nothing scores less.

    Each task runs twice, in boxes, as in training. Any other outcome (no solution, a wrong score, tests that give no score, a key that
    is refused) is named, and the command exits with 1.
    """
    from rollwright.environments.harbor.folder import HarborOptions
    from rollwright.environments.harbor.proof import TaskProof, prove_all
    from rollwright.environments.harbor.tasks import task_folders
    from rollwright.tracking.logging import console

    options = HarborOptions(
        reward_key=reward_key,
        network=network,
        host_env=tuple(host_env or ()),
        host_images=tuple(host_image or ()),
        verifier="shared" if shared else "separate",
    )
    folders = task_folders(path)

    async def prove() -> list[TaskProof]:
        proofs = []
        with console().status(f"0 of {len(folders)} tasks") as status:
            async for proof in prove_all(folders, options, sandbox, at_once or os.cpu_count() or 1):
                proofs.append(proof)
                status.update(f"{len(proofs)} of {len(folders)} tasks")
        return sorted(proofs, key=lambda proof: proof.path)

    proofs = asyncio.run(prove())
    _show(proofs, path)
    if any(proof.fault for proof in proofs):
        raise typer.Exit(1)


def _show(proofs: list, root: Path) -> None:
    from rich.markup import escape
    from rich.table import Table

    from rollwright.tracking.logging import console

    table = Table(box=None, pad_edge=False)
    table.add_column("task", overflow="fold")
    for name in ("solution", "nothing", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("outcome", overflow="fold")
    for proof in proofs:
        place = proof.path.resolve()
        name = str(place.relative_to(root.resolve())) if place != root.resolve() else place.name
        outcome = f"[bold red]{escape(proof.fault)}[/]" if proof.fault else "[green]ok[/]"
        table.add_row(escape(name), _score(proof.solved), _score(proof.idle), f"{proof.seconds:.1f}", outcome)
    console().print(table)
    wrong = sum(bool(proof.fault) for proof in proofs)
    console().print(f"{len(proofs)} tasks: {len(proofs) - wrong} ok, {wrong} not.")


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
