"""The normaliser: turns whatever a workflow returned into a trajectory of the data contract, and fills it from the record.

Accepted forms: ``None`` (rejected on purpose); a trajectory dict with several rows, or with one row in one dimension; the short form
``{"input_ids": [P], "output_ids": [N], "reward": float}``; an ``Experience``, a list of them, or a dict of them by name; a list of
trajectory dicts.

``RowMatcher`` finds the recorded response that each masked token came from. It makes two passes over a row, both on bytes, so that a row
of 8k tokens and 50 turns takes well under a millisecond:

1. *By context.* A response belongs at position ``p`` if the row's first ``p`` tokens are exactly its prompt; it covers the tokens from
   ``p`` on for as long as row and response agree. If several responses cover a token, the one that extends furthest wins. This resolves
   responses that were cut and continued, resampled branches, and groups with a shared prompt.
2. *By output.* A stretch of masked tokens that follows no recorded prompt (parallel paths joined into one row, a history that was rendered
   again) is matched with the responses that it consists of. The last prompt token must precede the response's first token, or the first
   token that the workflow kept. The longest agreement wins, then the longest agreement of the context before it.

A response is used at one position of a row. Ties go to the response whose log-probabilities the workflow returned, then to the response
that the fewest earlier rows used, then to the earlier response."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rollwright.errors import TrajectoryError
from rollwright.experience.contract import COLUMNS, ROUTED_EXPERTS, Origin, Trajectory
from rollwright.experience.experience import Experience
from rollwright.experience.players import fill_players
from rollwright.experience.recorder import TOKEN_TYPE, Recorder, RequestRecord, TokenPrefix, common_length
from rollwright.experience.trajectory import concat_padded_tensors, tensor_form


def normalise(
    result: Any, recorder: Recorder | None, *, workflow: str = "", task: object = "", tokenizer: Any = None
) -> Trajectory | None:
    """Convert a workflow's result to trajectory rows and fill in missing columns from the record.

    Args:
        result: return value of ``arun_episode`` or ``run``.
        recorder: recorder of the sample. If None, the result must include log-probabilities and versions.
        workflow, task: names for messages.
        tokenizer: decodes tokens for messages. None uses the tokenizer of the requests.

    Returns:
        A trajectory with every required key of the data contract, or None if the sample was rejected.

    Raises:
        TrajectoryError: the result has no accepted form, its lengths disagree, no request produced a masked token, or its
            log-probabilities, versions or temperature differ from the record.
    """
    if result is None:
        return None
    place = Origin(workflow, task)
    _refuse_unawaited("result", result, place)
    if isinstance(result, Mapping) and result and all(isinstance(value, Experience) for value in result.values()):
        result = list(result.values())
    items = list(result) if isinstance(result, list | tuple) else [result]
    if not items:
        raise place.error("result", "the workflow returned an empty list", "return None to reject the sample on purpose")
    trajectories: list[tuple[Trajectory, Origin]] = []
    for index, item in enumerate(items):
        at = place if len(items) == 1 else replace(place, index=index)
        if isinstance(item, Experience):
            try:
                trajectory = item.to_trajectory()
            except TrajectoryError as error:
                raise TrajectoryError(f"{at}: {error}") from None
        elif isinstance(item, Mapping):
            trajectory = tensor_form(item, at, recorder)
        elif isinstance(result, list | tuple):
            remedy = "a list holds Experience objects, or trajectory dicts"
            raise at.error("result", f"it is {type(item).__name__} in a list", remedy)
        else:
            remedy = (
                "return a dict of tensors, a list of Experience, the short form with input_ids, output_ids and reward, or None"
            )
            raise at.error("result", f"the workflow returned {type(item).__name__}", remedy)
        trajectories.append((trajectory, at))
    matcher = None if recorder is None else RowMatcher(recorder.records, tokenizer)
    filled = []
    for trajectory, at in trajectories:
        fill_players(trajectory, at)
        masked = trajectory["loss_mask"].bool() & trajectory["attention_mask"]
        if matcher is None:
            _fill_without_record(trajectory, masked, at)
        else:
            fill_from_record(trajectory, masked.numpy(), matcher, at)
        # the contract's columns first, in its order
        filled.append({key: trajectory[key] for key in (*COLUMNS, *trajectory) if key in trajectory})
    if len(filled) == 1:
        return filled[0]
    try:
        return concat_padded_tensors(filled)
    except TrajectoryError as error:
        raise place.error("result", str(error), "return rows with the same keys") from error


def _refuse_unawaited(key: str, value: Any, place: Origin) -> None:
    """Raise with the source line if a result, one of its items, or the value of a key or attribute is an un-awaited coroutine."""
    if inspect.isawaitable(value):
        name = getattr(value, "__qualname__", type(value).__name__)
        origin = getattr(value, "cr_origin", None)  # set in the rollout's event loop, which tracks coroutine origins
        where = f" at {origin[0][0]}:{origin[0][1]}" if origin else ""
        if inspect.iscoroutine(value):
            value.close()  # avoids Python's "never awaited" warning
        raise place.error(key, f"it is a call of {name}{where} that was not awaited", "write await before it")
    if isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_unawaited(str(name), item, place)
    elif isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        for item in value:
            _refuse_unawaited(key, item, place)
    elif isinstance(value, Experience):
        _refuse_unawaited("reward", value.reward, place)


def _fill_without_record(trajectory: Trajectory, masked: torch.Tensor, place: Origin) -> None:
    """Use the workflow's own log-probabilities and versions; modifies ``trajectory``."""
    for name, neutral in (("logprobs", torch.tensor(0.0)), ("versions", torch.tensor(-1, dtype=torch.int32))):
        if name not in trajectory and masked.any():
            wrong = "the workflow gave none and there is no record of its requests to fill it from"
            raise place.error(name, wrong, f"return {name} with the rows")
        trajectory[name] = torch.where(masked, trajectory.get(name, neutral), neutral)
    trajectory.setdefault("temperature", torch.ones(len(masked)))
    trajectory.setdefault("truncated", torch.zeros(len(masked), dtype=torch.bool))


#: Largest accepted differences between a workflow's values and the record (log-probabilities pass through float32).
TOLERANCES = {"logprobs": 1e-4, "versions": 0, "temperature": 1e-5}

_WIDTH = TOKEN_TYPE.itemsize


def fill_from_record(trajectory: Trajectory, masked: np.ndarray, matcher: RowMatcher, place: Origin) -> None:
    """Write the record's log-probabilities, versions, temperatures and truncation into the rows; modifies ``trajectory``."""
    rows, ids = len(masked), trajectory["input_ids"].numpy()
    given = {name: trajectory[name].numpy() for name in TOLERANCES if name in trajectory}
    logprobs = np.zeros(masked.shape, dtype=np.float32)
    versions = np.full(masked.shape, -1, dtype=np.int32)
    temperature = np.ones(rows, dtype=np.float32)
    truncated, shifted = np.zeros(rows, dtype=bool), np.zeros(rows, dtype=bool)
    experts = [np.zeros((0, 0), dtype=np.uint8)] * rows
    for row, length in enumerate(trajectory["attention_mask"].sum(dim=1).tolist()):
        mask = masked[row, :length]
        given_logprobs = given["logprobs"][row, :length] if "logprobs" in given else None
        matches = matcher.match(ids[row, :length], mask, given_logprobs)
        missing = mask.copy()
        for match in matches:
            part = slice(match.start, match.stop)
            logprobs[row, part] = match.record.output_logprobs[match.outputs]
            versions[row, part] = match.record.output_versions[match.outputs]
            missing[part] = False
        if missing.any():
            raise _unrecorded(ids[row, :length], missing, row, matcher, matches, place)
        logprobs[row, :length][~mask] = 0.0
        versions[row, :length][~mask] = -1
        experts[row] = _experts_of(ids[row, :length], matches)
        if matches:
            temperatures = sorted({match.record.temperature for match in matches})
            if temperatures[-1] - temperatures[0] > TOLERANCES["temperature"]:
                raise place.error(
                    "temperature",
                    f"row {row} holds responses sampled at temperatures {', '.join(f'{value:g}' for value in temperatures)}",
                    "a row has one temperature, at which the trainer scales its logits: sample at one, or return one row for each",
                )
            temperature[row] = temperatures[0]
            shifted[row] = any(match.record.logprobs_shifted for match in matches)
            last = matches[-1]  # the engine did not truncate a response that the workflow cut short
            truncated[row] = last.record.truncated and last.outputs.stop == len(last.record.output)
    has_masked: np.ndarray = np.any(masked, axis=1)
    if "temperature" in given:  # rows without a trained token keep their own
        temperature = np.where(has_masked, temperature, given["temperature"])
    filled = {"logprobs": logprobs, "versions": versions, "temperature": temperature}
    for name, values in given.items():
        _compare(name, values, filled[name], has_masked if name == "temperature" else masked, place)
    trajectory.update({name: torch.from_numpy(values) for name, values in filled.items()})
    trajectory.setdefault("truncated", torch.from_numpy(truncated))
    if shifted.any():
        trajectory["logprobs_shifted"] = torch.from_numpy(shifted)
    if (width := max(each.shape[1] for each in experts)) > 0:
        column = np.zeros((*masked.shape, width), dtype=np.result_type(*experts))
        for row, each in enumerate(experts):
            column[row, : len(each), : each.shape[1]] = each
        trajectory[ROUTED_EXPERTS] = torch.from_numpy(column)


def _experts_of(ids: np.ndarray, matches: list[RecordMatch]) -> np.ndarray:
    """Return the record of experts of a row's tokens, ``[length, W]``; ``[0, 0]`` if there is none.

    A token has the record of the first response that was sampled after it. Tokens whose text before them differs from the prompt of the
    response have none.
    """
    found = [(match, experts) for match in matches if (experts := match.record.routed_experts) is not None]
    if not found:
        return np.zeros((0, 0), dtype=np.uint8)
    kinds = [experts.dtype for _, experts in found]
    row, record = _Row(ids, np.ones(len(ids), dtype=bool)), np.zeros((len(ids), found[0][1].shape[1]), np.result_type(*kinds))
    known = 0  # tokens before this one have their record
    for match, experts in found:
        prompt = match.record.prompt
        before = np.concatenate([prompt.array, match.record.output[: match.offset]])
        first = max(known, match.start - row.context_agreement(match.start, before))
        shift = prompt.length - match.base
        record[first : match.stop - 1] = experts[first + shift : match.stop - 1 + shift]
        known = match.stop - 1
    return record


def _compare(name: str, given: np.ndarray, recorded: np.ndarray, where: np.ndarray, place: Origin) -> None:
    """Raise if the workflow's own values differ from the record."""
    with np.errstate(invalid="ignore"):
        wrong = where & ~(np.abs(given.astype(np.float64) - recorded.astype(np.float64)) <= TOLERANCES[name])
    if not wrong.any():
        return
    first = tuple(np.argwhere(wrong)[0].tolist())
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
    ids: np.ndarray, missing: np.ndarray, row: int, matcher: RowMatcher, matches: list[RecordMatch], place: Origin
) -> TrajectoryError:
    """Make the error for masked tokens that no request produced: their position, their text and the likely cause."""
    start = int(missing.argmax())
    stop = start + _count_until(~missing[start:])
    shown = ids[start:stop].tolist()
    text = f"{shown[:8]}{'…' if len(shown) > 8 else ''}"
    if matcher.tokenizer is not None:
        text += f" ({matcher.tokenizer.decode(shown[:32], skip_special_tokens=False)!r})"
    tokens = _Row(ids, missing)
    agreeing = [(tokens.agreement(start, record.output_bytes), record) for record in matcher.records]
    agreed, record = max(agreeing, key=lambda pair: pair[0], default=(0, None))
    cause = "mask only what the engine sampled"
    if not matcher.records:
        cause = (
            "this sample made no request through the engine that it was handed; ask that engine, or set loss_mask to 0 there"
        )
    elif agreed and record is not None:
        name = f"response {record.index} (conversation {record.conversation}, turn {record.turn})"
        if agreed == len(record.output) and any(match.record is record for match in matches):
            cause = f"{name} already stands elsewhere in this row: append resp.output_tokens once"
        elif agreed >= min(stop - start, len(record.output)):
            cause = (
                f"{name} has these tokens, but it was sampled after token {record.prompt.array[-1]}, not after {int(ids[start - 1])}: "
                "keep a response behind the prompt that it answers"
            )
        else:
            cause = (
                f"the nearest, {name}, agrees for {agreed} tokens and was sampled as {record.output[agreed]} next; train on "
                "resp.output_tokens as they were sampled, never decoded and encoded again"
            )
    wrong = f"row {row}, positions {start} to {stop - 1}: the masked tokens {text} were produced by no recorded request"
    return place.error("loss_mask", wrong, cause)


@dataclass(frozen=True)
class RecordMatch:
    """A match: tokens ``start:stop`` of a row are the record's output from ``offset`` on."""

    record: RequestRecord
    start: int
    stop: int
    offset: int = 0

    @property
    def base(self) -> int:
        """Position that the record's first output token has in the row, or would have if the workflow had kept it."""
        return self.start - self.offset

    @property
    def outputs(self) -> slice:
        """The matched slice of the record's output."""
        return slice(self.offset, self.offset + self.stop - self.start)


class RowMatcher:
    """Matches the rows of one sample with its recorded responses and counts how often each response was used.

    Args:
        records: requests of the sample.
        tokenizer: decodes tokens for messages. None uses the tokenizer of the requests.
    """

    def __init__(self, records: Sequence[RequestRecord], tokenizer: Any = None) -> None:
        self.records = list(records)
        self.tokenizer = tokenizer or next((record.tokenizer for record in records if record.tokenizer is not None), None)
        self._uses: Counter[int] = Counter()

    def match(self, ids: np.ndarray, mask: np.ndarray, given_logprobs: np.ndarray | None = None) -> list[RecordMatch]:
        """Match the masked tokens with the recorded responses as far as possible, in row order.

        Args:
            ids: ``[length]`` token ids of the row, without padding.
            mask: ``[length]`` bool, True for tokens that the policy sampled.
            given_logprobs: ``[length]`` log-probabilities that the workflow returned, to distinguish equal responses.

        Returns:
            Matches that do not overlap. A masked token outside of them was produced by no request.
        """
        row = _Row(ids, mask, given_logprobs)
        chosen = self._by_context(row)
        uncovered = mask.copy()
        for match in chosen:
            uncovered[match.start : match.stop] = False
        if uncovered.any():
            chosen += self._by_output(row, uncovered, {match.record.index: match.base for match in chosen})
            chosen.sort(key=lambda match: match.start)
        chosen = [match for match in chosen if mask[match.start : match.stop].any()]
        self._uses.update({match.record.index for match in chosen})
        return chosen

    def _by_context(self, row: _Row) -> list[RecordMatch]:
        """Choose for each token the response that extends furthest; a response ends where a longer one begins."""
        by_start: dict[int, list[RecordMatch]] = {}
        for record in self.records:
            start = record.prompt.length
            is_behind_its_prompt = start < len(row.ids) and start <= row.shared_with(record.prompt)
            if is_behind_its_prompt and (agreed := row.agreement(start, record.output_bytes)):
                by_start.setdefault(start, []).append(RecordMatch(record, start, start + agreed))
        chosen: list[RecordMatch] = []
        for start in sorted(by_start):
            longest = max(candidate.stop for candidate in by_start[start])
            equals = [candidate for candidate in by_start[start] if candidate.stop == longest]
            best = equals[0] if len(equals) == 1 else self._prefer(equals, row)
            if chosen and best.stop <= chosen[-1].stop:
                last = chosen[-1]
                shared = RecordMatch(last.record, best.start, best.stop, best.start - last.base)
                if best.stop < last.stop or not row.logprob_gap(best) < row.logprob_gap(shared) - 1e-6:
                    continue
            if chosen and chosen[-1].stop > start:
                chosen[-1] = replace(chosen[-1], stop=start)
            chosen.append(best)
        return chosen

    def _prefer(self, equals: list[RecordMatch], row: _Row) -> RecordMatch:
        return min(
            equals,
            key=lambda match: (
                round(row.logprob_gap(match), 6),
                self._uses[match.record.index],
                match.outputs.stop < len(match.record.output),
                match.record.index,
            ),
        )

    def _by_output(self, row: _Row, uncovered: np.ndarray, bases: dict[int, int]) -> list[RecordMatch]:
        found: list[RecordMatch] = []
        position = 0
        while uncovered[position:].any():
            start = position + int(uncovered[position:].argmax())
            stop = start + _count_until(~uncovered[start:])
            match = self._starting_at(row, start, stop, bases) or self._holding(row, start, stop, bases)
            position = stop
            if match is not None:
                found.append(match)
                bases[match.record.index] = match.base
                uncovered[match.start : match.stop] = False
                position = match.stop
        return found

    def _starting_at(self, row: _Row, start: int, stop: int, bases: dict[int, int]) -> RecordMatch | None:
        """Find the response that begins at ``start`` and has the longest agreement with the row."""
        first, before = int(row.ids[start]), int(row.ids[start - 1]) if start else -1
        found = [
            RecordMatch(record, start, start + row.agreement(start, record.output_bytes))
            for record in self.records
            if record.index not in bases and record.output[:1].tolist() == [first] and record.prompt.array[-1] == before
        ]
        longest = max((min(match.stop, stop) for match in found), default=0)
        found = [match for match in found if min(match.stop, stop) == longest]
        if len(found) > 1:
            contexts = [row.context_agreement(start, match.record.prompt.array) for match in found]
            found = [match for match, context in zip(found, contexts, strict=True) if context == max(contexts)]
        return self._prefer(found, row) if found else None

    def _holding(self, row: _Row, start: int, stop: int, bases: dict[int, int]) -> RecordMatch | None:
        """Find a response that contains the whole stretch but begins before it, because the workflow removed its first tokens."""
        if start == 0:
            return None
        needle = row.bytes[start * _WIDTH : stop * _WIDTH]
        found = []
        for record in self.records:
            if record.index in bases:
                offset = start - bases[record.index]
                if offset < 0 or not record.output_bytes.startswith(needle, offset * _WIDTH):
                    continue
            elif (offset := _token_find(record.output_bytes, needle)) < 1:
                continue
            if int(row.ids[start - 1]) in (record.prompt.array[-1], record.output[offset - 1]):
                found.append(RecordMatch(record, start, stop, offset))
        return self._prefer(found, row) if found else None


class _Row:
    """One row without padding, as an array and as bytes."""

    def __init__(self, ids: np.ndarray, mask: np.ndarray, given_logprobs: np.ndarray | None = None) -> None:
        self.ids = np.ascontiguousarray(ids, dtype=TOKEN_TYPE)
        self.mask = mask
        self.bytes = self.ids.tobytes()
        self.given = given_logprobs
        self._shared: dict[int, int] = {}

    def shared_with(self, prompt: TokenPrefix) -> int:
        """Return the length of the common prefix with the prompt's conversation, computed once for all prompts of the conversation."""
        key = id(prompt.buffer)
        if key not in self._shared:
            self._shared[key] = common_length(TokenPrefix(prompt.buffer, len(prompt.buffer.objects)).array, self.ids)
        return self._shared[key]

    def agreement(self, start: int, output: bytes) -> int:
        """Count the tokens from ``start`` on that agree with ``output``."""
        if output and self.bytes.startswith(output, start * _WIDTH):
            return len(output) // _WIDTH
        return common_length(self.ids[start:], np.frombuffer(output, dtype=TOKEN_TYPE))

    def context_agreement(self, start: int, prompt: np.ndarray) -> int:
        """Count the tokens before ``start`` that agree with the end of the prompt."""
        return common_length(self.ids[:start][::-1], prompt[::-1])

    def logprob_gap(self, match: RecordMatch) -> float:
        """Return the largest difference from the workflow's log-probabilities; 0 if the workflow returned none."""
        if self.given is None:
            return 0.0
        part = slice(match.start, match.stop)
        recorded = match.record.output_logprobs[match.outputs].astype(np.float32)
        return float(np.abs(self.given[part] - recorded)[self.mask[part]].max(initial=0.0))


def _count_until(stops: np.ndarray) -> int:
    """Count the entries before the first true entry, or all entries if none is true."""
    return int(stops.argmax()) if stops.any() else len(stops)


def _token_find(haystack: bytes, needle: bytes) -> int:
    """Return the first token offset of ``needle`` in ``haystack``, or -1."""
    at = haystack.find(needle)
    while at >= 0 and at % _WIDTH:
        at = haystack.find(needle, at + 1)
    return at // _WIDTH if at >= 0 else -1
