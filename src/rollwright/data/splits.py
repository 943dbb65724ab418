"""Splits that a hash of each task decides: train, valid and test never share a task, whatever their sizes and seeds."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Mapping

from rollwright.errors import DataError

#: Share of all tasks that each split gets, in percent.
SPLIT_SHARES = {"train": 80, "valid": 10, "test": 10}


def split_of(task: str, shares: Mapping[str, int] = SPLIT_SHARES) -> str:
    """Return the split that a task belongs to, from a hash of its canonical text.

    Args:
        task: text that is equal for equal tasks.
        shares: share of each split, in percent; they add up to 100.
    """
    bucket = int.from_bytes(hashlib.blake2b(task.encode(), digest_size=8).digest(), "big") % 100
    ends = itertools.accumulate(shares.values())
    return next(split for split, end in zip(shares, ends, strict=True) if bucket < end)


def check_split(dataset: str, split: str, splits: Collection[str] = SPLIT_SHARES) -> None:
    """Refuse the name of a split that a dataset does not have.

    Raises:
        DataError: ``split`` is none of ``splits``.
    """
    if split not in splits:
        raise DataError(f"{dataset}: there is no split {split!r}; choose {', '.join(splits)}.")
