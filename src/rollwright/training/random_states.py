"""The states of the random generators that training draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's global generators."""
    kind, internal, gauss = random.getstate()
    legacy: Any = numpy.random.get_state()
    name, keys, position, has_gauss, cached = legacy
    states: dict[str, Any] = {
        "python": {"kind": kind, "internal": list(internal), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(keys.astype(numpy.int64)),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the global generators to what ``random_states`` gave."""
    python, numpy_state = states["python"], states["numpy"]
    random.setstate((python["kind"], tuple(python["internal"]), python["gauss"]))
    keys = numpy_state["keys"].numpy().astype(numpy.uint32)
    numpy.random.set_state(
        (numpy_state["name"], keys, numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"])
    )
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
