"""One process that samples and trains, under faults."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from .parts import Part, Warm
from .proof import History, Proof, compare, curve, difference
from .run import BATCH, SAMPLES, Run, Tool

#: How far sampling of ``both-async`` may run ahead.
AHEAD = 2


class Both(Run):
    """One process that samples and trains.

    Args:
        reference: what an undisturbed run made, where it has to be the same; None: it need not be.
    """

    kinds = ("kill", "early", "tail", "checkpoint", "stop", "disk", "drop", "delay")
    steps = 8
    settings: tuple[str, ...] = ()
    slack = 0

    def __init__(self, *arguments: Any, reference: list[tuple[float, ...]] | None = None) -> None:
        super().__init__(*arguments)
        self.reference = reference

    def open(self) -> None:
        """One part, and the tool that it asks."""
        self.tool = Tool()
        self.proxies = [self.tool.proxy]
        self.write()
        self.parts = [Part(self.warm, "trainer", ["run", "config.yaml", *self.settings], self.root)]

    def write(self) -> None:
        """Write the config."""
        self.write_config(self.steps, f"{{port: {self.tool.proxy.port}}}")

    def close(self) -> None:
        """End the tool."""
        self.tool.close()

    @property
    def trial(self) -> Path:
        """The run's directory."""
        return self.root / "runs/faults/trial"

    def directory_of(self, part: Part) -> Path:
        """The run's directory."""
        return self.trial

    def history(self) -> History:
        """What its processes wrote to their journals."""
        return History([*sorted(self.trial.glob("attempts/*/journal")), self.trial / "journal"])

    def prove(self) -> Proof:
        """Every sample trained once; where it is deterministic, the curve of the undisturbed run."""
        history = self.history()
        proof = compare(history, steps=self.steps, batch=BATCH, samples=SAMPLES, slack=self.slack)
        if self.reference is not None and (parts := difference(curve(self.trial), self.reference)):
            proof.wrong.append(f"the curve is not that of the undisturbed run: {parts}")
        return proof


class BothSync(Both):
    """Synchronous and deterministic: the curve is that of a run that nothing happened to."""

    settings = ("deterministic=true",)

    @classmethod
    def prepare(cls, opened: contextlib.ExitStack, warm: Warm, root: Path, model: Path) -> dict[str, Any]:
        """The curve of a run to which nothing happens."""
        run = cls(warm, root / "undisturbed", model, 0)
        proof = run.carry_out([])
        assert proof.holds, proof
        return {"reference": curve(run.trial)}


class BothLora(BothSync):
    """The same with an adapter beside a frozen base; a recover checkpoint has the adapter alone."""

    settings = (*BothSync.settings, "actor.lora={rank: 4}", "actor.optimizer.lr=1.0e-2")


class BothCritic(BothSync):
    """The same with a critic, which a recover checkpoint has beside the policy."""

    settings = (*BothSync.settings, "actor.recipe=ppo", "critic={optimizer: {lr: 1.0e-2}, warmup_steps: 1}")


class BothAsync(Both):
    """Sampling runs ahead of training."""

    settings = (f"rollout.max_head_offpolicyness={AHEAD}",)
    slack = AHEAD
