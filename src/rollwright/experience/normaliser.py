"""The normaliser: whatever a workflow returned becomes a trajectory of the data contract, filled from the record.

Accepted forms: ``None`` (rejected on purpose); a trajectory dict, of rows or of one row in one dimension; the short form
``{"input_ids": [P], "output_ids": [N], "reward": float}``; an ``Experience`` or a list of them; a list of trajectory dicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollwright.errors import TrajectoryError
from rollwright.experience.contract import COLUMNS, Place, Trajectory
from rollwright.experience.experience import Experience
from rollwright.experience.recorder import TOKEN_TYPE, Recorder, RequestRecord
from rollwright.experience.trajectory import concat_padded_tensors, row_lengths, tensor_form

#: Log-probabilities that a workflow returns may differ by this from the record (they pass through float32).
LOGPROB_TOLERANCE = 1e-4
TEMPERATURE_TOLERANCE = 1e-5


def normalise(
    result: Any, recorder: Recorder | None, *, workflow: str = "", task: str = "", tokenizer: Any = None
) -> Trajectory | None:
    """Make trajectory rows of a workflow's result and fill what it left out from the record.

    Args:
        result: what ``arun_episode`` or ``run`` returned.
        recorder: the sample's recorder. None: there is no record; the result must bring log-probabilities and versions.
        workflow, task: names for messages.
        tokenizer: makes messages readable; the requests' own where left out.

    Returns:
        A trajectory with every required key of the data contract, or None where the sample was rejected.

    Raises:
        TrajectoryError: the result has no accepted form, its lengths disagree, a masked token was produced by no request,
            or it brought log-probabilities, versions or a temperature that are not the record's.
    """
    if result is None:
        return None
    place = Place(workflow, task)
    if isinstance(result, Mapping | Experience):
        items = [result]
    elif isinstance(result, list | tuple):
        items = list(result)
        if not items:
            raise place.error("result", "the workflow returned an empty list", "return None to reject the sample on purpose")
    else:
        raise place.error(
            "result",
            f"the workflow returned {type(result).__name__}",
            "return a dict of tensors, a list of Experience, the short form with input_ids, output_ids and reward, or None",
        )
    if recorder is not None and tokenizer is None:
        tokenizer = next((record.tokenizer for record in recorder.records if record.tokenizer is not None), None)
    trajectories = []
    for index, item in enumerate(items):
        at = place if len(items) == 1 else place.item(index)
        if isinstance(item, Experience):
            try:
                trajectory = item.to_trajectory()
            except TrajectoryError as error:
                raise TrajectoryError(f"{at}: {error}") from None
        elif isinstance(item, Mapping):
            trajectory = tensor_form(item, at, recorder)
        else:
            raise at.error(
                "result", f"it is {type(item).__name__} in a list", "a list holds Experience objects, or trajectory dicts"
            )
        trajectories.append((trajectory, at))
    matcher = None if recorder is None else RowMatcher(recorder.records)
    filled = [_in_order(_fill(trajectory, matcher, at, tokenizer)) for trajectory, at in trajectories]
    if len(filled) == 1:
        return filled[0]
    try:
        return concat_padded_tensors(filled)
    except TrajectoryError as error:
        raise place.error("result", str(error), "return rows with the same keys") from error


def _in_order(trajectory: Trajectory) -> Trajectory:
    """The contract's columns first, in its order, then the workflow's own."""
    known = {key: trajectory[key] for key in COLUMNS if key in trajectory}
    return {**known, **{key: value for key, value in trajectory.items() if key not in known}}


def _fill(trajectory: Trajectory, matcher: RowMatcher | None, place: Place, tokenizer: Any) -> Trajectory:
    """Write the record's log-probabilities, versions, temperatures and truncation into the rows, in place."""
    ids, loss_mask = trajectory["input_ids"], trajectory["loss_mask"]
    rows, width = ids.shape
    masked = loss_mask.bool() & trajectory["attention_mask"]
    if matcher is None:
        return _without_record(trajectory, masked, place)
    lengths = row_lengths(trajectory).tolist()
    ids_np, masked_np = ids.numpy(), masked.numpy()
    given = {name: trajectory[name].numpy() for name in ("logprobs", "versions", "temperature") if name in trajectory}
    logprobs = np.zeros((rows, width), dtype=np.float32)
    versions = np.full((rows, width), -1, dtype=np.int32)
    temperature = np.ones(rows, dtype=np.float32)
    truncated, shifted = np.zeros(rows, dtype=bool), np.zeros(rows, dtype=bool)
    for row, length in enumerate(lengths):
        mask = masked_np[row, :length]
        given_logprobs = given["logprobs"][row, :length] if "logprobs" in given else None
        placements = matcher.match(ids_np[row, :length], mask, given_logprobs)
        covered = np.zeros(length, dtype=bool)
        for placement in placements:
            part = slice(placement.start, placement.stop)
            outputs = slice(placement.offset, placement.offset + placement.stop - placement.start)
            logprobs[row, part] = placement.record.logprobs[outputs]
            versions[row, part] = placement.record.versions[outputs]
            covered[part] = True
        if (mask & ~covered).any():
            raise _unrecorded(ids_np[row, :length], mask & ~covered, row, matcher, placements, place, tokenizer)
        logprobs[row, :length][~mask] = 0.0
        versions[row, :length][~mask] = -1
        if placements:
            temperature[row] = _row_temperature(placements, row, place)
            shifted[row] = any(placement.record.logprobs_shifted for placement in placements)
            truncated[row] = placements[-1].record.truncated and placements[-1].reaches_end
    filled = {"logprobs": logprobs, "versions": versions, "temperature": temperature}
    has_masked = masked_np.any(axis=1)
    for name, values in given.items():
        where = has_masked if name == "temperature" else masked_np
        _compare(name, values, filled[name], where, place)
        if name == "temperature":  # rows that trained nothing keep what they were given
            filled[name] = np.where(has_masked, filled[name], values)
    trajectory.update({name: torch.from_numpy(values) for name, values in filled.items()})
    trajectory.setdefault("truncated", torch.from_numpy(truncated))
    if shifted.any():
        trajectory["logprobs_shifted"] = torch.from_numpy(shifted)
    return trajectory


def _without_record(trajectory: Trajectory, masked: torch.Tensor, place: Place) -> Trajectory:
    for name in ("logprobs", "versions"):
        if name not in trajectory and masked.any():
            raise place.error(
                name,
                "the workflow gave none and there is no record of its requests to fill it from",
                f"return {name} with the rows",
            )
    rows = masked.shape[0]
    trajectory.setdefault("logprobs", torch.zeros(masked.shape))
    trajectory.setdefault("versions", torch.full(masked.shape, -1, dtype=torch.int32))
    trajectory["logprobs"] = torch.where(masked, trajectory["logprobs"], 0.0)
    trajectory["versions"] = torch.where(masked, trajectory["versions"], -1)
    trajectory.setdefault("temperature", torch.ones(rows))
    trajectory.setdefault("truncated", torch.zeros(rows, dtype=torch.bool))
    return trajectory


def _row_temperature(placements: list[Placement], row: int, place: Place) -> float:
    temperatures = sorted({placement.record.temperature for placement in placements})
    if temperatures[-1] - temperatures[0] > TEMPERATURE_TOLERANCE:
        raise place.error(
            "temperature",
            f"row {row} holds responses sampled at temperatures {', '.join(f'{value:g}' for value in temperatures)}",
            "a row has one temperature, at which the trainer scales its logits: sample at one, or return one row for each",
        )
    return temperatures[0]


def _compare(name: str, given: np.ndarray, recorded: np.ndarray, where: np.ndarray, place: Place) -> None:
    """Raise where the workflow's own values are not the record's."""
    tolerance = {"logprobs": LOGPROB_TOLERANCE, "temperature": TEMPERATURE_TOLERANCE, "versions": 0}[name]
    with np.errstate(invalid="ignore"):
        wrong = where & ~(np.abs(given.astype(np.float64) - recorded.astype(np.float64)) <= tolerance)
    if not wrong.any():
        return
    first = tuple(int(index[0]) for index in np.nonzero(wrong))
    spot = f"row {first[0]}" + (f", position {first[1]}" if len(first) > 1 else "")
    hint = "return it as the engine gave it"
    if name == "logprobs" and not given[where].any():
        hint = "all of them are 0: return resp.output_logprobs"
    raise place.error(
        name,
        f"{int(wrong.sum())} of {int(where.sum())} values are not those of the record, first at {spot}: the workflow gave "
        f"{given[first]:g}, the engine {recorded[first]:g}",
        f"{hint}, or leave {name} out: they are filled from the record",
    )


def _unrecorded(
    ids: np.ndarray,
    missing: np.ndarray,
    row: int,
    matcher: RowMatcher,
    placements: list[Placement],
    place: Place,
    tokenizer: Any,
) -> TrajectoryError:
    """The message for masked tokens that no request produced: where they are, what they say, and the likely cause."""
    start = int(missing.argmax())
    stops = np.flatnonzero(~missing[start:])
    stop = start + int(stops[0]) if len(stops) else len(ids)
    shown = ids[start:stop].tolist()
    text = f"{shown[:8]}{'…' if len(shown) > 8 else ''}"
    if tokenizer is not None:
        text += f" ({tokenizer.decode(shown[:32], skip_special_tokens=False)!r})"
    cause = "mask only what the engine sampled"
    if not matcher.records:
        cause = (
            "this sample made no request through the engine that it was handed; ask that engine, or set loss_mask to 0 there"
        )
    elif (nearest := matcher.nearest(ids, start)) is not None:
        record, agreed = nearest
        name = f"response {record.index} (conversation {record.conversation}, turn {record.turn})"
        if agreed == len(record.output_ids) and any(placement.record is record for placement in placements):
            cause = f"{name} already stands elsewhere in this row: append resp.output_tokens once"
        elif agreed >= min(stop - start, len(record.output_ids)):
            cause = (
                f"{name} has these tokens, but it was sampled after token {record.prompt_ids[-1]}, not after {int(ids[start - 1])}: "
                "keep a response behind the prompt that it answers"
            )
        else:
            cause = (
                f"the nearest, {name}, agrees for {agreed} tokens and was sampled as {record.output_ids[agreed]} next; train on "
                "resp.output_tokens as they were sampled, never decoded and encoded again"
            )
    return place.error(
        "loss_mask",
        f"row {row}, positions {start} to {stop - 1}: the masked tokens {text} were produced by no recorded request",
        cause,
    )


# ----------------------------------------------------------------------
# Matching: which recorded response did each masked token of a row come from?
#
# Two passes over a row, both on bytes, so that a row of 8k tokens and 50 turns costs well under a millisecond each:
#
# 1. **By context.** A response belongs at position ``p`` where the row's first ``p`` tokens are exactly its prompt; it covers
#    the tokens from ``p`` on for as long as row and response agree. Where several cover a token, the one that goes on longest
#    wins: this settles responses that were cut and continued, resampled branches and groups with a shared prompt.
# 2. **By output.** A masked run that no prompt leads up to (parallel paths written one after another, histories rendered
#    anew) is matched with the responses that it consists of; the last prompt token must precede a response's first token, or
#    the first that the workflow kept of it, and the longest agreement wins, then that of the context before it.
#
# A response has one place in a row. Ties go to the response whose log-probabilities are those the workflow gave, then to the
# one that fewest earlier rows used, then to the earlier one.

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
