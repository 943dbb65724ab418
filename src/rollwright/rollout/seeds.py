"""Names of samples, and the seeds of their requests."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class SampleName(NamedTuple):
    """Identifies one execution of a task: ordinal of the draw, index of the sample in its group, and attempt."""

    ordinal: int
    index: int
    attempt: int = 0
    is_eval: bool = False

    def __str__(self) -> str:
        kind = "evaluation task" if self.is_eval else "task"
        again = f", attempt {self.attempt + 1}" if self.attempt else ""
        return f"{kind} {self.ordinal}, sample {self.index}{again}"


def request_seed(run_seed: int, sample: SampleName, conversation: int, turn: int, index: int = 0) -> int:
    """Compute the seed of a request: 63 bits of BLAKE2b over its position in the run, equal in every process and Python version.

    Args:
        run_seed: the run's seed.
        sample: the sample. Its attempt does not count, so a repeated sample draws the same tokens.
        conversation: number of the conversation, in order of first appearance in the sample.
        turn: number of the request in its conversation.
        index: number of the completion, if one prompt has several.
    """
    place = f"{run_seed}/{int(sample.is_eval)}/{sample.ordinal}/{sample.index}/{conversation}/{turn}/{index}"
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little") >> 1
