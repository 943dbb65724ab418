"""The normaliser: whatever a workflow returned becomes a trajectory of the data contract, filled from the record (``record_matching``).

Accepted forms: ``None`` (rejected on purpose); a trajectory dict, of rows or of one row in one dimension; the short form
``{"input_ids": [P], "output_ids": [N], "reward": float}``; an ``Experience``, or a list of them, or a dict of them by name; a list
of trajectory dicts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rollwright.errors import TrajectoryError
from rollwright.experience.contract import COLUMNS, Place, Trajectory
from rollwright.experience.experience import Experience
from rollwright.experience.record_matching import RowMatcher, fill_from_record
from rollwright.experience.recorder import Recorder
from rollwright.experience.trajectory import concat_padded_tensors, tensor_form


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
    _refuse_unawaited("result", result, place)
    if isinstance(result, Mapping) and result and all(isinstance(value, Experience) for value in result.values()):
        result = list(result.values())
    items = list(result) if isinstance(result, list | tuple) else [result]
    if not items:
        raise place.error("result", "the workflow returned an empty list", "return None to reject the sample on purpose")
    trajectories: list[tuple[Trajectory, Place]] = []
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


def _refuse_unawaited(key: str, value: Any, place: Place) -> None:
    """Raise with the source line if a result, one of its items, or the value of a key or attribute is an un-awaited coroutine."""
    if inspect.isawaitable(value):
        name = getattr(value, "__qualname__", type(value).__name__)
        origin = getattr(value, "cr_origin", None)  # set by rollout's event loop, which tracks coroutine origins
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


def _fill_without_record(trajectory: Trajectory, masked: torch.Tensor, place: Place) -> None:
    """Take the workflow's own log-probabilities and versions, in place."""
    for name, neutral in (("logprobs", torch.tensor(0.0)), ("versions", torch.tensor(-1, dtype=torch.int32))):
        if name not in trajectory and masked.any():
            wrong = "the workflow gave none and there is no record of its requests to fill it from"
            raise place.error(name, wrong, f"return {name} with the rows")
        trajectory[name] = torch.where(masked, trajectory.get(name, neutral), neutral)
    trajectory.setdefault("temperature", torch.ones(len(masked)))
    trajectory.setdefault("truncated", torch.zeros(len(masked), dtype=torch.bool))
