"""What the engine cannot serve as asked is told before it is queued.

A step computes many requests together, so what would break it must not get there: it would end all of them.
"""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.inference.request import ModelRequest

#: Numbers among the generation arguments: whether only whole ones make sense, and the limits that their config has.
_NUMBERS: dict[str, tuple[bool, Any]] = {
    field.name: (str(field.type).startswith("int"), field.metadata)
    for field in fields(GenerationHyperparameters)
    if field.type in ("int", "float", "int | None")
}


def check_sampling(gconfig: GenerationHyperparameters) -> None:
    """See that every generation argument is of its type and within its limits.

    Raises:
        EngineError: one is not; it is named.
    """
    for name, (is_whole, limits) in _NUMBERS.items():
        value = getattr(gconfig, name)
        if value is None and name == "seed":
            continue
        if isinstance(value, bool) or not isinstance(value, Integral if is_whole else Real) or not math.isfinite(value):
            raise EngineError(f"{name} is {value!r}; it has to be {'a whole' if is_whole else 'a finite'} number.")
        if value < limits.get("ge", value) or value <= limits.get("gt", -math.inf) or value > limits.get("le", value):
            bounds = {"ge": "at least", "gt": "more than", "le": "at most"}
            said = " and ".join(f"{words} {limits[key]}" for key, words in bounds.items() if key in limits)
            raise EngineError(f"{name} is {value!r}; it has to be {said}.")
    if gconfig.n_samples != 1:
        raise EngineError(
            f"n_samples is {gconfig.n_samples}, and one request is one completion: send n_samples requests, each with "
            "gconfig.new(n_samples=1)."
        )
    if any(not isinstance(text, str) for text in gconfig.stop or ()):
        raise EngineError(f"stop is {gconfig.stop!r}; it has to be a list of texts.")
    if any(isinstance(token, bool) or not isinstance(token, Integral) for token in gconfig.stop_token_ids):
        raise EngineError(f"stop_token_ids is {gconfig.stop_token_ids!r}; it has to be a list of token ids.")


def check_layout(request: ModelRequest, context_length: int) -> None:
    """See that positions and branches, where given, fit the prompt.

    Raises:
        EngineError: they do not.
    """
    length = len(request.input_ids)
    for name in ("position_ids", "branch_ids"):
        ids = getattr(request, name)
        if ids is not None and len(ids) != length:
            raise EngineError(f"{name} has {len(ids)} entries for {length} tokens (rid {request.rid}); give one for each.")
    if request.position_ids is not None and (furthest := max(request.position_ids)) >= context_length:
        raise EngineError(
            f"position_ids hold {furthest}, and the engine's context ends at {context_length - 1} (rid {request.rid}): count "
            "positions from 0, or start the engine with a larger context_length."
        )


def check_media(request: ModelRequest, takes_multi_modal: bool, model_name: str) -> None:
    """Refuse adapters, and images that the model or the engine does not take.

    Raises:
        EngineError: with what to do instead.
    """
    if request.lora_name is not None:
        raise EngineError("The built-in engine serves one set of weights and no named LoRA adapters: leave lora_name unset.")
    if request.image_data and not request.multi_modal:
        raise EngineError("The built-in engine takes images as processor outputs in multi_modal, not as image_data.")
    if request.multi_modal and not takes_multi_modal:
        raise EngineError(f"{model_name} takes text only, and the request carries {sorted(request.multi_modal)}.")
    if request.multi_modal and request.branch_ids is not None:
        raise EngineError("A multi-modal request cannot have branches in the built-in engine.")
