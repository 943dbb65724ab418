"""Parses expressions that divide devices between generation and training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rollwright.config.servers import BACKENDS
from rollwright.errors import ConfigError

GRAMMAR = (
    "write ENGINE:SIZES+SIZES, such as 'sglang:d1p1t1+d1p1t1': before the + the engine (sglang, vllm, builtin, or a registered one) and its sizes, "
    "after it the trainer's; one side may be left out. SIZES are d (data), p (pipeline) and t (tensor) parallel with a number "
    "each, in any order; what is left out is 1."
)
TRAINING_BACKENDS = ("fsdp",)
_AXES = {"d": "data", "p": "pipeline", "t": "tensor"}


@dataclass(frozen=True)
class ParallelSizes:
    """Parallelism along each axis; the product is the number of devices."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.data * self.pipeline * self.tensor

    @property
    def instance_size(self) -> int:
        """Number of devices of one copy of the model."""
        return self.pipeline * self.tensor

    def __str__(self) -> str:
        return f"d{self.data}p{self.pipeline}t{self.tensor}"


def _size(side: str, axis: str, meaning: str) -> Any:
    """Return a property that reads one size of one side; 0 if that side is not given."""
    return property(lambda allocation: getattr(getattr(allocation, side), axis, 0), doc=meaning)


@dataclass(frozen=True)
class AllocationMode:
    """A parsed allocation: the sizes of generation and of training, if given.

    Attributes:
        gen_backend: sglang, vllm or builtin; None if only training is given.
        generation: sizes of the engine, or None.
        train_backend: fsdp; None if only generation is given.
        training: sizes of the trainer, or None.
    """

    gen_backend: str | None = None
    generation: ParallelSizes | None = None
    train_backend: str | None = None
    training: ParallelSizes | None = None

    @classmethod
    def from_str(cls, text: str) -> AllocationMode:
        """Parse ``"sglang:d1p1t1+d1p1t1"``, ``"sglang:d1p1t1"`` or ``"fsdp:d2"`` (``"d2"``).

        Raises:
            ConfigError: the expression does not follow the grammar, which the message shows.
        """
        sides = text.replace(" ", "").split("+")
        if not all(sides) or len(sides) > 2:
            raise ConfigError(
                f"allocation {text!r} has {len(sides)} sides around '+', some of them empty or too many; {GRAMMAR}"
            )
        parsed = [_side(side, text) for side in sides]
        generating = [side for side in parsed if side[0] in BACKENDS]
        training = [side for side in parsed if side not in generating]
        if len(generating) > 1 or len(training) > 1:
            raise ConfigError(f"allocation {text!r} names two sides of one kind; one generates and one trains; {GRAMMAR}")
        if len(parsed) == 2 and parsed[0] not in generating:
            raise ConfigError(f"allocation {text!r}: the engine stands before the '+'; {GRAMMAR}")
        gen_backend, generation = generating[0] if generating else (None, None)
        train_backend, train_sizes = training[0] if training else (None, None)
        return cls(gen_backend, generation, (train_backend or "fsdp") if train_sizes else None, train_sizes)

    gen_dp_size = _size("generation", "data", "Copies of the model that generate; 0 if not given.")
    gen_pp_size = _size("generation", "pipeline", "Pipeline stages of a generating copy; 0 if not given.")
    gen_tp_size = _size("generation", "tensor", "Tensor-parallel devices of a generating copy's stage; 0 if not given.")
    gen_world_size = _size("generation", "world_size", "Devices that generate.")
    gen_instance_size = _size("generation", "instance_size", "Devices of one generating copy.")
    train_dp_size = _size("training", "data", "Data-parallel ranks of the trainer; 0 if not given.")
    train_pp_size = _size("training", "pipeline", "Pipeline stages of the trainer; 0 if not given.")
    train_tp_size = _size("training", "tensor", "Tensor-parallel ranks of the trainer; 0 if not given.")
    train_world_size = _size("training", "world_size", "Devices that train.")

    def __str__(self) -> str:
        trained = str(self.training) if self.generation else f"{self.train_backend}:{self.training}"
        sides = [(self.generation, f"{self.gen_backend}:{self.generation}"), (self.training, trained)]
        return "+".join(text for given, text in sides if given)


def _side(side: str, text: str) -> tuple[str | None, ParallelSizes]:
    backend, colon, sizes = side.rpartition(":")
    if colon and backend not in BACKENDS and backend not in TRAINING_BACKENDS:
        raise ConfigError(f"allocation {text!r}: there is no engine {backend!r}; {GRAMMAR}")
    if not re.fullmatch(r"([dpt]\d+)+", sizes):
        raise ConfigError(f"allocation {text!r}: {sizes!r} are no sizes; {GRAMMAR}")
    found = re.findall(r"([dpt])(\d+)", sizes)
    axes = [axis for axis, _ in found]
    if len(set(axes)) < len(axes) or any(int(number) < 1 for _, number in found):
        raise ConfigError(f"allocation {text!r}: in {sizes!r} each axis may stand once, with a number of at least 1; {GRAMMAR}")
    return backend or None, ParallelSizes(**{_AXES[axis]: int(number) for axis, number in found})
