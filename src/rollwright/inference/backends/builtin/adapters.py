"""LoRA adapters that the built-in engine holds by name. ``low_rank`` computes with them.

An adapter's tensors are copies that nothing changes, so a request keeps the numbers that it began with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.weights.adapter import PREFIX, AdapterSpec
from rollwright.inference.weights.stream import WeightStream

_HALVES = (".lora_A.weight", ".lora_B.weight")
_keys = itertools.count(1)


# ------------------------------------------------------------------ the linear layers of a model


def base_of(module: Any) -> Any:
    """Return the layer below PEFT's, or the module itself if nothing is injected there."""
    return module.base_layer if type(module).__module__.startswith("peft.") and hasattr(module, "base_layer") else module


def is_linear(module: Any) -> bool:
    """Return whether a module computes a linear layer that an adapter can be added to."""
    return isinstance(base_of(module), (nn.Linear, Conv1D))


def linear_shape(module: Any) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a linear layer."""
    base = base_of(module)
    return (base.out_features, base.in_features) if isinstance(base, nn.Linear) else (base.nf, base.nx)


def linear_paths(model: nn.Module) -> list[str]:
    """Return the paths of all linear layers that adapters can be added to."""
    injected = tuple(f"{path}." for path, module in model.named_modules() if base_of(module) is not module)
    return [path for path, module in model.named_modules() if is_linear(module) and not path.startswith(injected)]


# ------------------------------------------------------------------ the adapters that an engine holds


@dataclass(eq=False)
class Adapter:
    """An adapter that an engine holds. Its tensors never change.

    Attributes:
        name: name in requests.
        spec: rank, scaling and targets.
        version: version of the tokens that it samples.
        factors: A ``[rank, in]`` and ``scaling · B`` ``[out, rank]`` by module path, in float32.
        run: name of the run that published it; empty if the engine serves one run.
        path: directory that it was loaded from; empty if it came from memory.
        digest: digest of the tensors, if it was loaded from a directory.
        key: distinguishes the keys and values computed with it from those of others, also of one that had its name before.
        is_held: False once the engine has dropped it; running requests still use it.
    """

    name: str
    spec: AdapterSpec
    version: int
    factors: dict[str, tuple[Tensor, Tensor]]
    run: str = ""
    path: str = ""
    digest: str = ""
    key: int = field(default_factory=lambda: next(_keys))
    is_held: bool = True

    @classmethod
    def copied(cls, name: str, weights: WeightStream, model: nn.Module, version: int, **about: Any) -> Adapter:
        """Copy an adapter's tensors to the device of ``model``.

        Args:
            name: name in requests.
            weights: tensors under PEFT's names, and ``adapter``, which describes them.
            model: the model that it adapts.
            version: version of the tokens that it samples.
            about: ``run``, ``path`` and ``digest``.

        Raises:
            WeightUpdateError: the adapter does not fit the model, or is of a kind that the engine cannot compute.
        """
        spec, halves = weights.adapter, dict[str, dict[str, Tensor]]()
        assert spec is not None
        if spec.use_dora:
            raise WeightUpdateError(
                f"The adapter {name} has use_dora, which the built-in engine (rollout.backend: builtin, rollwright serve-model) does "
                "not compute unmerged: set actor.lora.use_dora to false, or sample with vLLM or SGLang servers."
            )
        device = next(model.parameters()).device
        for tensor_name, tensor in weights:
            suffix = next((half for half in _HALVES if tensor_name.endswith(half)), None)
            if suffix is None or not tensor_name.startswith(PREFIX):
                raise WeightUpdateError(
                    f"The adapter {name} holds {tensor_name}, which is no lora_A or lora_B of a linear layer: train adapters of linear "
                    "layers only (target_modules without embeddings, no modules_to_save, no bias)."
                )
            path = tensor_name.removeprefix(PREFIX).removesuffix(suffix)
            halves.setdefault(path, {})[suffix] = tensor.detach().to(device, torch.float32, copy=True)
        if not halves:
            raise WeightUpdateError(f"The adapter {name} holds no tensors.")
        with torch.no_grad():
            factors = {path: _factors(name, spec, model, path, pair) for path, pair in halves.items()}
        return cls(name, spec, version, factors, **about)

    def equals(self, other: Adapter) -> bool:
        """Return whether both have the same scaled tensors and version."""
        return (
            self.version == other.version
            and self.factors.keys() == other.factors.keys()
            and all(
                torch.equal(a, b) for path in self.factors for a, b in zip(self.factors[path], other.factors[path], strict=True)
            )
        )


def _factors(name: str, spec: AdapterSpec, model: nn.Module, path: str, pair: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Check the two matrices of one layer, and scale B."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise WeightUpdateError(
            f"The adapter {name} adapts {path}, which is not in the model: it belongs to another model."
        ) from None
    if not is_linear(module):
        kind = type(base_of(module)).__name__
        raise WeightUpdateError(
            f"The adapter {name} adapts {path}, a {kind}; the built-in engine applies adapters to linear layers."
        )
    if len(pair) < len(_HALVES):
        missing = next(half for half in _HALVES if half not in pair)
        raise WeightUpdateError(f"The adapter {name} lacks {PREFIX}{path}{missing}.")
    a, b = (pair[half] for half in _HALVES)
    outputs, inputs = linear_shape(module)
    if tuple(a.shape) != (spec.rank, inputs) or tuple(b.shape) != (outputs, spec.rank):
        raise WeightUpdateError(
            f"The adapter {name} has matrices {tuple(a.shape)} and {tuple(b.shape)} for {path}, which takes {(spec.rank, inputs)} and "
            f"{(outputs, spec.rank)} at rank {spec.rank}: it belongs to another model or has another rank than its configuration."
        )
    return a, b.mul_(spec.scaling)


class AdapterTable:
    """The adapters that requests can name.

    Args:
        most: maximum number of adapters of a run.
        prepare: prepares the model for an adapter; raises WeightUpdateError if the model cannot be computed with it.
        forget: frees what was computed with the adapters of these keys.
    """

    def __init__(self, most: int, prepare: Callable[[Adapter], object], forget: Callable[[set[int]], object]) -> None:
        self.most = most
        self._prepare, self._forget = prepare, forget
        self._held: dict[str, Adapter] = {}

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._held.values()))

    def get(self, name: str) -> Adapter | None:
        """Return the adapter of that name, or None."""
        return self._held.get(name)

    def named(self, name: str) -> Adapter:
        """Return the adapter of that name.

        Raises:
            EngineError: there is none; the message lists those that there are.
        """
        if (adapter := self._held.get(name)) is None:
            names = ", ".join(self._held) or "none"
            raise EngineError(f"There is no adapter {name!r} (lora_name); the engine holds {names}. Publish or load it first.")
        return adapter

    def of_run(self, run: str) -> list[Adapter]:
        """Return a run's adapters in the order in which they came: a run that went back has lower versions last."""
        return [adapter for adapter in self if adapter.run == run]

    def published(self) -> list[Adapter]:
        """Return the adapters that the trainer in this process published, the newest last."""
        return [adapter for adapter in self.of_run("") if not adapter.path]

    def check_room(self, adapter: Adapter) -> None:
        """Check that its run may have another adapter.

        Raises:
            WeightUpdateError: it may not.
        """
        others = [other.name for other in self.of_run(adapter.run) if other.name != adapter.name]
        if len(others) >= self.most:
            raise WeightUpdateError(
                f"The adapter {adapter.name} is one too many: {', '.join(others)} are held, and max_adapters is {self.most}. Unload "
                "one, or raise max_adapters."
            )

    def hold(self, adapter: Adapter) -> None:
        """Hold an adapter under its name, in place of one that has this name.

        Raises:
            WeightUpdateError: the model cannot be computed with it.
        """
        self._prepare(adapter)
        self.drop([adapter.name])
        self._held[adapter.name] = adapter

    def drop(self, names: Iterable[str]) -> None:
        """Drop adapters, and what was computed with them for requests that have ended; running requests keep theirs."""
        dropped = [adapter for name in names if (adapter := self._held.pop(name, None)) is not None]
        for adapter in dropped:
            adapter.is_held = False
        self._forget({adapter.key for adapter in dropped})
