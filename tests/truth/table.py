"""``python -m tests.truth.table``: compares every causal family with its untouched forward, and writes the table of ``docs/engine.md``.

A row of the table is for all cases that come to the same: what they go past, and what each part of the product does there.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from rollwright.atomic import write_json, write_text
from rollwright.processes.pool import processor_count

from . import families

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
BEGIN, END = "<!-- families: made by python -m tests.truth.table -->", "<!-- end of families -->"


def parts() -> dict[str, Callable[[families.Made], Mapping[str, str]]]:
    """By column, what a part of the product comes to in each of its ways: ``equal…``, ``refused``, or something that is wrong."""
    from . import test_engine, test_trainer

    return {"engine": test_engine.outcomes, "trainer": test_trainer.outcomes}


def cell(outcomes: Mapping[str, str]) -> str:
    """What a part comes to, in short: once if all its ways come to the same."""
    if len(set(outcomes.values())) == 1:
        return next(iter(outcomes.values()))
    return "; ".join(f"{way}: {said}" for way, said in outcomes.items())


def lines(found: Mapping[str, Mapping[str, str]], missing: Mapping[str, str]) -> list[str]:
    """The table and the list of what it does not cover.

    Args:
        found: by case, by column, what its cell says.
        missing: by case, why it is not covered.
    """
    columns = list(dict.fromkeys(column for cells in found.values() for column in cells))
    together: dict[tuple[str, ...], list[str]] = {}
    for name, cells in sorted(found.items()):
        past = ", ".join(regime.name for regime in families.cases()[name].regimes) or "–"
        together.setdefault((past, *(cells[column] for column in columns)), []).append(name)
    made = [f"| past | {' | '.join(columns)} | families |", "|" + "---|" * (len(columns) + 2)]
    made += [f"| {' | '.join(key)} | {', '.join(names)} |" for key, names in sorted(together.items())]
    reasons: dict[str, list[str]] = {}
    for name, reason in sorted(missing.items()):
        kind = re.sub(r"[\d.]+(e-\d+)?", "…", reason).split(":")[0]
        reasons.setdefault(kind, []).append(name)
    return [*made, "", "Not covered:", "", *(f"- {', '.join(names)}: {kind}" for kind, names in sorted(reasons.items()))]


def said(name: str) -> dict[str, str]:
    """By column, what the table of the page says of a case.

    Raises:
        KeyError: it says nothing.
    """
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in _section() if line.startswith("|")]
    for row in rows[2:]:
        if name in row[-1].split(", "):
            return dict(zip(rows[0][1:-1], row[1:-1], strict=True))
    raise KeyError(f"{name} is not in the table of {PAGE}: run python -m tests.truth.table.")


def _section() -> list[str]:
    return PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()


def write(found: Mapping[str, Mapping[str, str]], missing: Mapping[str, str]) -> None:
    """Put the table into the page."""
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    write_text(PAGE, "\n".join([f"{before}{BEGIN}", "", *lines(found, missing), "", f"{END}{after}"]))


def looked_at(name: str, device: str = "cpu") -> tuple[dict[str, str], str]:
    """By column, what a case comes to on a device, and why it is not covered; one of them is empty."""
    torch.set_num_threads(1)
    try:
        made = families.made(name).on(device)
    except families.NotCovered as reason:
        return {}, str(reason)
    try:
        return {column: cell(outcomes(made)) for column, outcomes in parts().items()}, ""
    except Exception as error:  # neither equal nor refused: to be seen in the table
        return {"wrong": f"{type(error).__name__}: {str(error).splitlines()[0]}"}, ""
    finally:
        families.made.cache_clear()  # hundreds of models


def main() -> None:
    """Compare all cases, or those that are named or on a GPU (then the page stays as it is), one for each processor at a time."""
    parser = argparse.ArgumentParser(prog="python -m tests.truth.table", description=__doc__)
    parser.add_argument("names", nargs="*", help="cases to look at; none: all, and the page is written")
    parser.add_argument("--device", default="cpu", help="where engine, trainer and the untouched forward compute")
    parser.add_argument("--json", type=Path, help="write there, by case and column, what it comes to")
    arguments = parser.parse_args()
    names, on_gpu = arguments.names, arguments.device != "cpu"
    found: dict[str, dict[str, str]] = {}
    missing = {} if names else families.not_built()
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(1 if on_gpu else processor_count(), maxtasksperchild=20) as pool:
        wanted = names or list(families.cases())
        for name, (cells, reason) in zip(
            wanted, pool.imap(functools.partial(looked_at, device=arguments.device), wanted), strict=True
        ):
            if reason:
                missing[name] = reason
            else:
                found[name] = cells
            print(f"{name}: {cells or reason} ({time.monotonic() - began:.0f} s)", flush=True)
    if arguments.json:
        write_json(arguments.json, found)
    if not names and not on_gpu:
        write(found, missing)


if __name__ == "__main__":
    main()
