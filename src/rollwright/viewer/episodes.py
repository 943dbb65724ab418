"""The recorded episodes of samples: their rows, attempts, and where one parts from better ones of its group."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollwright.errors import JournalError
from rollwright.viewer import reading
from rollwright.viewer.index import Index
from rollwright.viewer.samples import Samples
from rollwright.viewer.tree import parting as parting_of_rows

_COMPARED = 16  # most better samples of its group to compare a sample with


class Episodes:
    """The episodes of a journal.

    Args:
        index: index of the journal.
        samples: the samples of the index.
    """

    def __init__(self, index: Index, samples: Samples) -> None:
        self._index = index
        self._samples = samples

    def of(self, key: str) -> reading.RecordedEpisode:
        """Return the episode of a sample; see ``Run.sample``."""
        return self.at(key, self._samples.find(key)[1])

    def at(self, key: str, places: bytes) -> reading.RecordedEpisode:
        """Return the episode of a sample whose records are at packed places.

        Raises:
            JournalError: the records were removed.
        """
        try:
            return reading.read_episode(self._index, places)
        except OSError as error:
            raise JournalError(
                f"the records of sample {key} cannot be read ({error}): its file was removed (journal.keep) or not copied."
            ) from None

    def task_and_rows(self, samples: Sequence[Mapping[str, Any]]) -> tuple[Any, str, list[tuple[str, int, Any]]]:
        """Return the task of a group, why it cannot be read (empty if it can), and key, number and content of each row of its samples.

        Of a sample with several attempts, only the best one counts.
        """
        task, error, rows = None, "", []
        best = {sample["index"]: sample for sample in samples if not sample["key"].count("#") or sample["status"] == "accepted"}
        for sample in best.values() or samples:
            _, places, trained = self._samples.find(sample["key"])
            episode = self.at(sample["key"], places)
            if task is None:
                task, error = episode.task(), episode.begin.task_error
            found = reading.rows_of(episode, reading.read_trained(self._index, trained))
            rows += [(sample["key"], number, row) for number, row in enumerate(found)]
        return task, error, rows

    def parting(self, sample: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Find the first token that differs from all samples of the task with a higher reward; see ``Run.sample``."""
        own = sample["reward"]
        better = {
            each["key"]: each for each in group if own is not None and each["reward"] is not None and each["reward"] > own
        }
        first = {}
        best_first = sorted(better, key=lambda key: -better[key]["reward"])
        for key in [sample["key"], *best_first[:_COMPARED]] if better else []:
            with contextlib.suppress(JournalError):  # the records of other samples in the group may be gone
                rows = reading.rows_of(self.of(key))
                first |= {key: rows[0]} if rows else {}
        row = first.pop(sample["key"], None)
        found = parting_of_rows(row, first) if row is not None else None
        if found is None:
            return None
        token, key = found
        return {"token": token, "key": key, "reward": better[key]["reward"], "better": len(better), "compared": len(first)}

    def attempt(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Describe an attempt of a sample, with the error that it raised."""
        traceback = ""
        if sample["status"] == "failed":
            end = self.of(sample["key"]).end
            traceback = "" if end is None else end.traceback
        name, _, message = sample["reason"].partition(": ")
        is_error = sample["status"] == "failed" and re.fullmatch(r"[\w.]+", name) is not None
        return {
            "key": sample["key"],
            "attempt": sample["attempt"],
            "status": sample["status"],
            "class": name if is_error else "",
            "message": message if is_error else sample["reason"],
            "traceback": traceback,
        }


def neighbours(sample: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the keys of the previous and next sample in a group, and of those with the highest and lowest reward."""
    keys = [each["key"] for each in group]
    place = keys.index(sample["key"]) if sample["key"] in keys else -1
    rewarded = sorted((each for each in group if each["reward"] is not None), key=lambda each: each["reward"])
    return {
        "previous": keys[place - 1] if place > 0 else None,
        "next": keys[place + 1] if 0 <= place < len(keys) - 1 else None,
        "best": rewarded[-1]["key"] if rewarded else None,
        "worst": rewarded[0]["key"] if rewarded else None,
    }
