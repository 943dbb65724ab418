"""Copies of a model's matrices in the order in which oneDNN reads them, on a CPU.

With the few rows of a decode step, MKL's products take longer than the processor needs to read the matrices; oneDNN's take less if each
matrix has been reordered once, and with the many rows of prompts, too. The copies follow the weights: they are made again after each publication, and when torch has counted a change
of a parameter, which it does not do for all optimizers (AdamW's fused step) or for ``parameter.data``. Whether they
pay depends on the processor, so that this is measured once at the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollwright.inference.backends.builtin.loading import free_memory
from rollwright.tracking.logging import getLogger

logger = getLogger(__name__)

#: Rows that the order is chosen for; others are computed as well.
_ROWS = 16
#: Rows that are computed at once: with more, oneDNN takes longer for each (by 1.25 with 1024 or 2048, 135M on an AMD EPYC).
FASTEST_ROWS = 512
#: With smaller matrices MKL is as fast (1M on an AMD EPYC; 5M takes 1.2 to 2 times as long).
_LEAST_BYTES = 8 << 20
#: Share of the free memory that the copies may take.
_SHARE = 1 / 6
#: The copies are used if MKL's products take this many times as long.
_GAIN = 1.15


class PackedWeights:
    """Reordered copies of the matrices of layers and head.

    Args:
        parameters: of the model; a change of one that torch counts makes the copies new, like other ``layers``.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        #: The layers, and the number of changes that the parameters had seen.
        self._made_of: tuple[list[SimpleNamespace], int] | None = None
        self._copies: tuple[list[SimpleNamespace], Tensor] | None = None

    def of(self, layers: list[SimpleNamespace], head: Tensor) -> tuple[list[SimpleNamespace], Tensor]:
        """Return layers and head with reordered matrices under the same names; all else is shared.

        Args:
            layers: the tensors of each layer. Names that end with ``_weight_t`` are transposed.
            head: ``[vocabulary, hidden]``.
        """
        changes = sum(parameter._version for parameter in self._parameters)
        if self._copies is None or self._made_of is None or self._made_of[0] is not layers or self._made_of[1] != changes:
            self._copies = None  # their memory is free before it is taken again
            self._copies, self._made_of = ([_packed_layer(layer) for layer in layers], reordered(head)), (layers, changes)
        return self._copies


def reordered(weight: Tensor) -> Tensor:
    """Return a copy of a matrix ``[outputs, inputs]`` that ``packed_linear`` computes with."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)


def packed_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``rows @ weight.T + bias`` with a reordered matrix."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def _packed_layer(layer: SimpleNamespace) -> SimpleNamespace:
    packed = {}
    for name, tensor in vars(layer).items():
        if name.endswith("_weight"):
            packed[name] = reordered(tensor)
        elif name.endswith("_weight_t"):
            packed[name] = reordered(tensor.t())
    return SimpleNamespace(**{**vars(layer), **packed})


def packed_if_faster(model: Any, matrices: list[Tensor]) -> PackedWeights | None:
    """Return the copies for a model, not made yet, if they fit into memory and decode steps are faster with them.

    Args:
        model: a model on a CPU.
        matrices: the largest matrix of each layer, ``[outputs, inputs]``.
    """
    size = sum(parameter.nbytes for parameter in model.parameters())
    if size < _LEAST_BYTES or not torch.backends.mkldnn.is_available() or size > _SHARE * free_memory():
        return None
    if any(parameter.is_inference() for parameter in model.parameters()):  # whose changes are not counted
        return None
    weights = matrices[:12]  # more than the caches of most processors
    with torch.inference_mode():
        rows = torch.randn(_ROWS, weights[0].shape[1], dtype=weights[0].dtype)
        try:
            packed = [reordered(weight) for weight in weights]
            of_onednn = _seconds(lambda: [packed_linear(rows, weight, None) for weight in packed])
        except (RuntimeError, AttributeError):  # this build of torch has no such operators
            return None
        of_mkl = _seconds(lambda: [F.linear(rows, weight) for weight in weights])
    if of_mkl < _GAIN * of_onednn:
        return None
    logger.info(
        "Products use copies of the weights that are ordered for oneDNN (%.1f GB): with %d rows they take %.0f %% of the time of the weights' own.",
        size / 1e9,
        _ROWS,
        100 * of_onednn / of_mkl,
    )
    return PackedWeights(model.parameters())


def _seconds(work: Callable[[], object]) -> float:
    """Return the least processor time of a few calls, after one that is not counted."""
    taken = []
    for _ in range(5):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken[1:])
