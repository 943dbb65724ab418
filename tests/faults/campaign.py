"""As many runs of a topology as it takes for a number of kills, each proved by itself, and a report of all."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from postgresql_server import postgresql_programs, postgresql_server
from warm import Warm

from .plan import KILLS
from .proof import Proof
from .topologies import TOPOLOGIES


def write_model(path: Path) -> Path:
    """A Qwen3 of two layers, 0.03 M parameters, with random weights and a character tokenizer."""
    from rollwright.data.tokenizer import build_character_tokenizer
    from rollwright.training.model import new_model

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    new_model(path, tokenizer=build_character_tokenizer(), max_position_embeddings=2048, **sizes)
    return path


def campaign(
    topology: str,
    kills: int,
    seed: int,
    root: Path,
    *,
    model: Path | None = None,
    warm: Warm | None = None,
    store: str = "postgresql",
    said: Callable[[str], object] = print,
    report_to: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Runs of a topology until ``kills`` processes were killed; the report.

    Args:
        topology: a name of ``TOPOLOGIES``.
        kills: SIGKILLs in all.
        seed: of what is drawn.
        root: an empty directory; what a run that did not hold leaves stays there.
        model: directory of a tiny model; None: one is made.
        warm: starts the parts; None: one of its own.
        store: of explore-train, postgresql (where it is installed) or sqlite.
        said: is given a line for each run.
        report_to: file that has the report of the runs so far; a campaign may take hours.
        options: of the topology.
    """
    root.mkdir(parents=True, exist_ok=True)
    generator, started = random.Random(f"{topology}/{seed}"), time.monotonic()
    model = model or write_model(root / "model")
    counts: Counter[str] = Counter()
    total, runs, report, chosen = Proof(), 0, {}, TOPOLOGIES[topology]
    recovered: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as opened:
        if warm is None:
            warm = Warm()
            opened.callback(warm.close)
        if topology == "explore-train" and store == "postgresql" and postgresql_programs() is not None:
            options["postgresql"] = opened.enter_context(postgresql_server())
        options |= chosen.prepare(opened, warm, root, model)
        while (left := kills - sum(counts[name] for name in KILLS)) > 0:
            runs += 1
            run = chosen(warm, root / f"run-{runs}", model, generator.randrange(1 << 30), **options)
            run.said = said
            faults = run.plan(generator, left)
            began = time.monotonic()
            try:
                proof = run.carry_out(faults)
            except AssertionError as error:  # that no campaign ends with: the runs after it may say more
                proof = Proof(wrong=[f"run {runs}: {error}"])
            counts += run.counts
            total += proof
            for name, seconds in run.recovered:
                recovered[name].append(round(seconds, 1))
            happened = ", ".join(f"{count} {name}" for name, count in sorted(run.counts.items()))
            said(f"run {runs}: {happened}; {time.monotonic() - began:.1f} s; {'holds' if proof.holds else proof}")
            if proof.holds:
                shutil.rmtree(run.root)
            report = {
                "topology": topology,
                "seed": seed,
                "runs": runs,
                "kills": sum(counts[name] for name in KILLS),
                "faults": dict(sorted(counts.items())),
                **total.report(),
                "seconds": round(time.monotonic() - started, 1),
            }
            if recovered:
                report |= {"recovered": recovered, "slowest": max(map(max, recovered.values()))}
            if topology == "explore-train":
                report["store"] = "postgresql" if options.get("postgresql") else "sqlite"
            if report_to is not None:
                report_to.write_text(json.dumps(report, indent=2) + "\n")
            if not run.counts:
                raise AssertionError(f"nothing happened to a run: {proof}")
    return report


def holds(report: dict[str, Any]) -> bool:
    """True where nothing was lost, repeated or left behind, and no more tokens sampled again than were in flight."""
    nothing = not (report["lost"] or report["duplicated"] or report["left_behind"] or report["wrong"])
    return nothing and report["lost_tokens"] <= report["in_flight_tokens"]


def own_directory() -> Path:
    """A directory for one campaign."""
    return Path(tempfile.mkdtemp(prefix="rollwright-faults-"))
