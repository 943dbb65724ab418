"""The normaliser: whatever a workflow returned becomes a trajectory of the data contract, filled from the record.

Accepted forms: ``None`` (rejected on purpose); a trajectory dict, of rows or of one row in one dimension; the short form
``{"input_ids": [P], "output_ids": [N], "reward": float}``; an ``Experience`` or a list of them; a list of trajectory dicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rollwright.errors import TrajectoryError
from rollwright.experience.contract import COLUMNS, Place, Trajectory
from rollwright.experience.experience import Experience
from rollwright.experience.forms import tensor_form
from rollwright.experience.matching import Placement, RowMatcher
from rollwright.experience.recorder import Recorder
from rollwright.experience.trajectory import concat_padded_tensors, row_lengths

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
