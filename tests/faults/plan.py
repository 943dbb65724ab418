"""What happens to a run, and when: drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

#: Faults that end a process with SIGKILL, and how often each is drawn. ``early`` comes while the process starts; ``tail`` and
#: ``checkpoint`` also damage what it wrote last.
KILLS = {"kill": 6, "early": 1, "tail": 2, "checkpoint": 1}
#: Faults that a process may survive: it is stopped for a while (SIGSTOP), its disk is full (RLIMIT_FSIZE), its connections are
#: broken (``drop``) or slow (``delay``).
OTHERS = {"stop": 2, "disk": 2, "drop": 2, "delay": 1}


@dataclass(frozen=True)
class Fault:
    """One thing that happens to a run.

    Attributes:
        kind: of ``KILLS`` or ``OTHERS``.
        part: number that chooses one of the parts that run.
        after: when, counted from the fault before in what the run writes to its journals; 1 is what a step writes.
        pause: further seconds.
        size: seconds that a stop, a broken or a slow connection lasts, or share of a file that a full disk still takes.
    """

    kind: str
    part: int
    after: float
    pause: float
    size: float

    @property
    def kills(self) -> bool:
        """True where it ends a process for sure."""
        return self.kind in KILLS


def plan(generator: random.Random, kills: int, kinds: Iterable[str]) -> list[Fault]:
    """Faults with ``kills`` kills among them, of the kinds that a topology knows."""
    known = set(kinds)
    faults: list[Fault] = []
    for _ in range(kills):
        weighted = [KILLS] if generator.random() < 0.6 else [OTHERS, KILLS]
        for weights in weighted:
            chosen = {kind: weight for kind, weight in weights.items() if kind in known}
            if not chosen:
                continue
            (kind,) = generator.choices(list(chosen), list(chosen.values()))
            # What goes on is written again: the shorter times are in the middle of that, the longer ones come after it.
            after = 0.0 if kind == "early" else generator.uniform(0.0, 1.6) * generator.choice([0.5, 2])
            pause = generator.uniform(0.0, 0.8 if kind == "early" else 0.05)
            faults.append(Fault(kind, generator.randrange(1 << 16), after, pause, generator.uniform(0.1, 1.0)))
    return faults
