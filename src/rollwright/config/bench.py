"""Mode ``bench``: which checkpoints are evaluated, and how."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class BenchConfig:
    """Scores of the checkpoints of a run on its evaluation tasks; generation arguments are those of the tasksets or the evaluator."""

    checkpoints: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Model directories, or names; empty: the model that the run began with, and every checkpoint of the run."
        },
    )
    samples: int = field(default=8, metadata={"help": "Samples of each task.", "ge": 1})
    pass_at: list[int] = field(
        default_factory=lambda: [1, 2, 4, 8], metadata={"help": "Each k of pass@k; those above samples are left out."}
    )
    pass_reward: float = field(default=1.0, metadata={"help": "Reward from which on a sample passes."})
