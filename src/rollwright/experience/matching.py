"""Matching: which recorded response did each masked token of a row come from?

Two passes over a row, both on bytes, so that a row of 8k tokens and 50 turns costs well under a millisecond each:

1. **By context.** A response belongs at position ``p`` where the row's first ``p`` tokens are exactly its prompt; it covers
   the tokens from ``p`` on for as long as row and response agree. Where several cover a token, the one that goes on longest
   wins: this settles responses that were cut and continued, resampled branches and groups with a shared prompt.
2. **By output.** A masked run that no prompt leads up to (parallel paths written one after another, histories rendered
   anew) is matched with the responses that it consists of; the last prompt token must precede a response's first token, or
   the first that the workflow kept of it, and the longest agreement wins, then that of the context before it.

A response has one place in a row. Ties go to the response whose log-probabilities are those the workflow gave, then to the
one that fewest earlier rows used, then to the earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollwright.experience.recorder import TOKEN_TYPE, RequestRecord

_WIDTH = TOKEN_TYPE.itemsize


@dataclass(frozen=True)
class Placement:
    """Tokens ``start:stop`` of a row are the record's output from ``offset`` on."""

    record: RequestRecord
    start: int
    stop: int
    offset: int = 0

    @property
    def base(self) -> int:
        """Where in the row the record's first output token is, or would be."""
        return self.start - self.offset

    @property
    def reaches_end(self) -> bool:
        """True where the row holds the response to its last token."""
        return self.stop - self.base == len(self.record.output_ids)


class RowMatcher:
    """Matches the rows of one sample; keeps count of the responses that its rows have used."""

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        self.records = list(records)
        self._uses: dict[int, int] = {}

    def match(self, ids: np.ndarray, mask: np.ndarray, given_logprobs: np.ndarray | None = None) -> list[Placement]:
        """Placements that cover the masked tokens as far as the record goes, in the row's order.

        Args:
            ids: ``[length]`` token ids of the row, without padding.
            mask: ``[length]`` bool, true where the policy sampled the token.
            given_logprobs: ``[length]`` what the workflow gave, to tell equal responses apart.

        Returns:
            Placements that do not overlap. A masked token outside all of them was produced by no request.
        """
        row = _Row(ids, mask, given_logprobs)
        candidates = self._by_context(row)
        chosen = self._sweep(candidates, row)
        uncovered = mask.copy()
        for placement in chosen:
            uncovered[placement.start : placement.stop] = False
        if uncovered.any():
            chosen += self._by_output(row, uncovered, {placement.record.index: placement.base for placement in chosen})
            chosen.sort(key=lambda placement: placement.start)
        chosen = [placement for placement in chosen if mask[placement.start : placement.stop].any()]
        for index in {placement.record.index for placement in chosen}:
            self._uses[index] = self._uses.get(index, 0) + 1
        return chosen

    def _by_context(self, row: _Row) -> list[Placement]:
        found = []
        for record in self.records:
            start = len(record.prompt_ids)
            if start < row.length and row.bytes.startswith(record.prompt_bytes):
                agreed = row.agreement(start, record.output_bytes)
                if agreed:
                    found.append(Placement(record, start, start + agreed))
        return found

    def _sweep(self, candidates: list[Placement], row: _Row) -> list[Placement]:
        """For each token the candidate that goes on longest; a response that another one overtakes ends there."""
        chosen: list[Placement] = []
        by_start: dict[int, list[Placement]] = {}
        for candidate in candidates:
            by_start.setdefault(candidate.start, []).append(candidate)
        for start in sorted(by_start):
            same = by_start[start]
            longest = max(candidate.stop for candidate in same)
            best = self._prefer([candidate for candidate in same if candidate.stop == longest], row)
            if chosen and best.stop < chosen[-1].stop:
                continue
            if chosen and best.stop == chosen[-1].stop and not self._better_given(best, chosen[-1], row):
                continue
            if chosen and chosen[-1].stop > start:
                last = chosen[-1]
                chosen[-1] = Placement(last.record, last.start, start, last.offset)
            chosen.append(best)
        return chosen

    @staticmethod
    def _better_given(one: Placement, other: Placement, row: _Row) -> bool:
        shared = Placement(other.record, one.start, one.stop, one.start - other.base)
        return row.logprob_gap(one) < row.logprob_gap(shared) - 1e-6

    def _prefer(self, equals: list[Placement], row: _Row) -> Placement:
        if len(equals) == 1:
            return equals[0]
        return min(
            equals,
            key=lambda placement: (
                round(row.logprob_gap(placement), 6),
                self._uses.get(placement.record.index, 0),
                not placement.reaches_end,
                placement.record.index,
            ),
        )

    def _by_output(self, row: _Row, uncovered: np.ndarray, placed: dict[int, int]) -> list[Placement]:
        found: list[Placement] = []
        position = 0
        while True:
            rest = np.flatnonzero(uncovered[position:])
            if not len(rest):
                return found
            start = position + int(rest[0])
            gaps = np.flatnonzero(~uncovered[start:])
            stop = start + int(gaps[0]) if len(gaps) else row.length
            placement = self._starting_at(row, start, stop, placed) or self._holding(row, start, stop, placed)
            if placement is None:
                position = stop
                continue
            found.append(placement)
            placed[placement.record.index] = placement.base
            uncovered[placement.start : placement.stop] = False
            position = placement.stop

    def _starting_at(self, row: _Row, start: int, stop: int, placed: dict[int, int]) -> Placement | None:
        """The response that begins at ``start`` and agrees with the row for longest."""
        best: list[Placement] = []
        first, before = int(row.ids[start]), int(row.ids[start - 1]) if start else -1
        for record in self.records:
            if record.index in placed or not record.output_ids or record.output_ids[0] != first:
                continue
            if record.prompt_ids[-1] != before:
                continue
            placement = Placement(record, start, start + row.agreement(start, record.output_bytes))
            reach = min(placement.stop, stop)
            if best and reach < min(best[0].stop, stop):
                continue
            if best and reach > min(best[0].stop, stop):
                best = []
            best.append(placement)
        if len(best) > 1:
            contexts = [row.context_agreement(start, placement.record.prompt_ids) for placement in best]
            best = [placement for placement, context in zip(best, contexts, strict=True) if context == max(contexts)]
        return self._prefer(best, row) if best else None

    def _holding(self, row: _Row, start: int, stop: int, placed: dict[int, int]) -> Placement | None:
        """A response that holds the whole run somewhere inside: the workflow cut tokens off its front."""
        if start == 0:
            return None
        needle = row.bytes[start * _WIDTH : stop * _WIDTH]
        found = []
        for record in self.records:
            if record.index in placed:
                offset = start - placed[record.index]
                if offset < 0 or not record.output_bytes.startswith(needle, offset * _WIDTH):
                    continue
            elif (offset := _token_find(record.output_bytes, needle)) < 1:
                continue
            if int(row.ids[start - 1]) not in (record.prompt_ids[-1], record.output_ids[offset - 1]):
                continue
            found.append(Placement(record, start, stop, offset))
        return self._prefer(found, row) if found else None

    def nearest(self, ids: np.ndarray, start: int) -> tuple[RequestRecord, int] | None:
        """The record that agrees longest with the row from ``start`` on, and for how many tokens; for messages."""
        row = _Row(ids, np.ones(len(ids), dtype=bool), None)
        best = None
        for record in self.records:
            agreed = row.agreement(start, record.output_bytes)
            if agreed and (best is None or agreed > best[1]):
                best = (record, agreed)
        return best


class _Row:
    """One row without padding, in the forms that matching needs."""

    def __init__(self, ids: np.ndarray, mask: np.ndarray, given_logprobs: np.ndarray | None) -> None:
        self.ids = np.ascontiguousarray(ids, dtype=TOKEN_TYPE)
        self.mask = mask
        self.length = len(ids)
        self.bytes = self.ids.tobytes()
        self.given = given_logprobs

    def agreement(self, start: int, output: bytes) -> int:
        """How many tokens the row has from ``start`` on in common with ``output``."""
        at = start * _WIDTH
        if output and self.bytes.startswith(output, at):
            return len(output) // _WIDTH
        other = np.frombuffer(output, dtype=TOKEN_TYPE)
        count = min(self.length - start, len(other))
        differ = self.ids[start : start + count] != other[:count]
        return int(differ.argmax()) if differ.any() else count

    def context_agreement(self, start: int, prompt_ids: list[int]) -> int:
        """How many tokens before ``start`` are also the prompt's last."""
        prompt = np.asarray(prompt_ids, dtype=TOKEN_TYPE)
        count = min(start, len(prompt))
        differ = self.ids[start - count : start][::-1] != prompt[len(prompt) - count :][::-1]
        return int(differ.argmax()) if differ.any() else count

    def logprob_gap(self, placement: Placement) -> float:
        """Largest difference from the log-probabilities that the workflow gave; 0 where it gave none."""
        if self.given is None:
            return 0.0
        part = slice(placement.start, placement.stop)
        outputs = slice(placement.offset, placement.offset + placement.stop - placement.start)
        recorded = np.asarray(placement.record.logprobs[outputs], dtype=np.float32)
        masked = self.mask[part]
        gaps = np.abs(self.given[part] - recorded)[masked]
        return float(gaps.max()) if len(gaps) else 0.0


def _token_find(haystack: bytes, needle: bytes) -> int:
    """The first token offset at which ``needle`` stands in ``haystack``, or -1."""
    at = haystack.find(needle)
    while at >= 0 and at % _WIDTH:
        at = haystack.find(needle, at + 1)
    return at // _WIDTH if at >= 0 else -1
