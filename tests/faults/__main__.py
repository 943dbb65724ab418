"""``python -m tests.faults``: the long form."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from .campaign import campaign, holds, own_directory
from .topologies import TOPOLOGIES


def main() -> int:
    """Run a campaign; 1 where it does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="processes to kill in all (20)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (1)")
    parser.add_argument("--topology", choices=list(TOPOLOGIES), default="both-sync")
    parser.add_argument("--store", choices=["postgresql", "sqlite"], default="postgresql", help="of explore-train")
    parser.add_argument("--json", type=Path, help="where the report goes, after each run that of the runs so far")
    parser.add_argument("--directory", type=Path, help="to work in; what does not hold stays there (a temporary one)")
    parser.add_argument("--interval", type=float, help="seconds between two kills of long-episodes (1) and search-agent (20)")
    given = parser.parse_args()
    root = given.directory or own_directory()
    report = campaign(
        given.topology,
        given.kills,
        given.seed,
        root,
        store=given.store,
        said=lambda line: print(line, flush=True),
        report_to=given.json,
        **({} if given.interval is None else {"interval": given.interval}),
    )
    print(json.dumps(report, indent=2))
    if holds(report):
        shutil.rmtree(root, ignore_errors=True)
        return 0
    print(f"It does not hold; what is left is in {root}.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
