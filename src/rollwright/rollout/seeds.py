"""The name of a sample, and the seed of each of its requests.

A small file that ``sequence_processing`` reads too: its responses are drawn as a run's are.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class SampleName(NamedTuple):
    """Which execution of which task: the draw's ordinal, the sample within the group, the attempt."""

    ordinal: int
    index: int
    attempt: int = 0
    is_eval: bool = False

    def __str__(self) -> str:
        kind = "evaluation task" if self.is_eval else "task"
        again = f", attempt {self.attempt + 1}" if self.attempt else ""
        return f"{kind} {self.ordinal}, sample {self.index}{again}"


def request_seed(run_seed: int, sample: SampleName, conversation: int, turn: int, index: int = 0) -> int:
    """A request's seed: 63 bits of BLAKE2b over its place in the run; the same in every process and version of Python.

    Args:
        run_seed: the run's seed.
        sample: the sample; its attempt does not count, so that a sample that is run again draws the same tokens.
        conversation: the conversation's number, in order of first appearance in the sample.
        turn: the request's number in its conversation.
        index: which of several completions of one prompt.
    """
    place = f"{run_seed}/{int(sample.is_eval)}/{sample.ordinal}/{sample.index}/{conversation}/{turn}/{index}"
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little") >> 1
