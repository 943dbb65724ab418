"""LoRA adapters of a trained model, as PEFT computes them (arXiv 2106.09685).

PEFT wraps each adapted linear layer. The model stays the same object of the same class, its own parameters are frozen, and the adapter's
parameters are the only ones that are trained.

Invariants:

* an adapter's parameters are float32 (float64 if the base is), whatever the type of the base;
* nothing is ever merged into the weights of a model that trains or samples;
* B is 0 at the start, so that the adapted model computes what its base computes.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rollwright.config.sections import LoraConfig
from rollwright.errors import CheckpointError, ConfigError, WeightUpdateError
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.weights.adapter import CONFIG_FILE, PREFIX, AdapterSpec, is_adapter
from rollwright.inference.weights.files import read_stream
from rollwright.inference.weights.stream import WeightStream
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.parallel import full_tensor, sharded_like

logger = getLogger("training")

#: Name under which PEFT holds the adapter inside its layers. It does not occur in files.
_ADAPTER = "default"

#: The end of the name that an adapter's tensor has in the model.
_PART = re.compile(rf"\.(lora_A|lora_B|lora_magnitude_vector)\.{_ADAPTER}\.weight$")


def add_adapter(model: nn.Module, config: LoraConfig, base: str) -> AdapterSpec:
    """Freeze a model and wrap its linear layers with a new adapter, in place.

    Args:
        model: a Hugging Face model. If its parameters are on the meta device, so are the adapter's, and ``initialise`` has to be called
            once they are allocated and the base is loaded.
        config: the adapter.
        base: name or path of the model, for the description.

    Returns:
        The description of the adapter.

    Raises:
        ConfigError: PEFT is not installed, or a target is not a linear layer of the model.
    """
    peft = _peft()
    layers = _linear_layers(model)
    targets = _targets(model, layers, config.targets)
    chosen = {name for name, own in layers.items() if own in targets}
    others = tuple(name for name, _ in model.named_modules() if name not in chosen and _short_name(name) in targets)
    description = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(targets),
        exclude_modules=list(others) or None,  # PEFT matches the ends of names, also in a vision tower
        lora_dropout=config.dropout,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
    )
    is_empty = next(model.parameters()).is_meta
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):  # ``initialise`` replaces PEFT's values
        peft.inject_adapter_in_model(description, model, adapter_name=_ADAPTER, low_cpu_mem_usage=is_empty)
    del model.peft_config  # else transformers takes the model for one that it loaded with an adapter
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_PART.search(name) is not None)
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(torch.float32, parameter.dtype))
    if not is_empty:
        initialise(model)
    return AdapterSpec(config.rank, config.alpha, targets, config.use_rslora, config.use_dora, base, others)


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"lora is set, and the package {error.name} is not installed: pip install 'rollwright[lora]'."
        ) from None
    return peft


def _linear_layers(model: Any) -> dict[str, str]:
    """Return the linear layers of a model's text part, without the output head: their paths, and their names as in a description."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    inside = {id(module) for module in text.modules()}
    return {
        name: _short_name(name)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and id(module) in inside
    }


def _short_name(path: str) -> str:
    """Return the last part of a module's path; a number, as in ``nn.Sequential``, with the part before it."""
    parts = path.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def _targets(model: nn.Module, layers: Mapping[str, str], wanted: Iterable[str]) -> tuple[str, ...]:
    names = dict.fromkeys(layers.values())
    kind = type(model).__name__
    if not names:
        raise ConfigError(f"lora is set, but {kind} has no linear layers (torch.nn.Linear) that an adapter could wrap.")
    if unknown := [name for name in wanted if name not in names]:
        raise ConfigError(
            f"lora.targets names {unknown[0]!r}, which is no linear layer of {kind} beside its output head: choose of {', '.join(names)}; "
            "an empty list means all of them."
        )
    if any(parameter.dim() >= 3 for name, parameter in model.named_parameters() if "expert" in name):
        logger.info("The experts of %s are stacked tensors, not linear layers, and get no adapter; they stay frozen.", kind)
    return tuple(sorted(set(wanted) or names))


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Draw A uniformly in ± 1 / sqrt(inputs), set B to 0 and, for DoRA, the magnitudes to the norms of the base's rows. Collective.

    Does nothing without an adapter. The values depend on torch's seed, and on neither the number of ranks nor how the model is sharded. Torch's state does not change.
    """
    if not (layers := _adapted(model)):
        return
    seed = parallel.from_first_rank(lambda: torch.initial_seed() % (1 << 62))
    generator = torch.Generator().manual_seed(seed)
    for _, layer in layers:
        a, b = (part[_ADAPTER].weight for part in (layer.lora_A, layer.lora_B))
        bound = a.shape[1] ** -0.5
        values = torch.empty(a.shape, dtype=a.dtype).uniform_(-bound, bound, generator=generator)
        a.copy_(sharded_like(values, a))
        b.zero_()
        if _ADAPTER in layer.lora_magnitude_vector:
            magnitudes = layer.lora_magnitude_vector[_ADAPTER].weight
            norms = torch.linalg.vector_norm(full_tensor(layer.base_layer.weight).to(magnitudes.dtype), dim=1)
            magnitudes.copy_(sharded_like(norms, magnitudes))


def _adapted(model: nn.Module) -> list[tuple[str, Any]]:
    """Return PEFT's layers with their paths."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]


def carries_adapter(model: nn.Module) -> bool:
    """Return True if PEFT's layers are in the model."""
    return bool(_adapted(model))


def names_in_model(model: nn.Module) -> dict[str, str]:
    """Return the name of each of the adapter's tensors in PEFT's files, and its name in the model."""
    found = {}
    for name, _ in model.named_parameters():
        if part := _PART.search(name):
            end = "" if part[1] == "lora_magnitude_vector" else ".weight"
            found[f"{PREFIX}{name[: part.start()]}.{part[1]}{end}"] = name
    return found


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Prepare the adapter's layers for a compute type: in a 16-bit type, autocast converts their inputs, not PEFT."""
    for _, layer in _adapted(model):
        layer.cast_input_dtype_enabled = dtype == torch.float32


def set_dropout(model: nn.Module, active: bool) -> None:
    """Switch the dropout of the adapter's inputs on or off."""
    for _, layer in _adapted(model):
        layer.lora_dropout.train(active)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Compute with the base inside the context."""
    layers = [layer for _, layer in _adapted(model)]
    try:
        for (
            layer
        ) in layers:  # PEFT's enable_adapters would also change requires_grad, which FSDP keeps from the first forward pass on
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def base_alone(model: nn.Module) -> Iterator[None]:
    """Take the adapter's layers out of the module tree inside the context, so that modules and tensors have the base's names."""
    layers = _adapted(model)
    try:
        for name, layer in layers:
            model.set_submodule(name, layer.base_layer)
        yield
    finally:
        for name, layer in layers:
            model.set_submodule(name, layer)


def base_of(model: nn.Module) -> nn.Module:
    """Return the base of an adapted model that is not sharded: other modules over the same parameters and buffers."""
    with base_alone(model):
        return _same_tensors(model)


def _same_tensors(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model, {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())})


def with_adapter(model: nn.Module, weights: WeightStream) -> nn.Module:
    """Return a model with an adapter: other modules over the model's own parameters, and a copy of the adapter.

    Raises:
        WeightUpdateError: the tensors are not those of an adapter of this model.
    """
    spec = weights.adapter
    assert spec is not None
    adapted = _same_tensors(model)
    config = LoraConfig(spec.rank, spec.alpha, list(spec.targets), use_rslora=spec.use_rslora, use_dora=spec.use_dora)
    add_adapter(adapted, config, spec.base)
    fill_adapter(adapted, weights)
    return adapted


@torch.no_grad()
def fill_adapter(model: nn.Module, weights: WeightStream) -> None:
    """Copy an adapter's tensors, under PEFT's names, into a model. Each rank copies its own shards.

    Raises:
        WeightUpdateError: they are not those of an adapter of this model.
    """
    names, parameters = names_in_model(model), dict(model.named_parameters())
    shapes = {name: parameters[inner].shape for name, inner in names.items()}
    given = {name: tensor.shape for name, tensor in weights.described}
    if wrong := sorted(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name)):
        there = [list(each[wrong[0]]) if wrong[0] in each else "missing" for each in (given, shapes)]
        raise WeightUpdateError(
            f"The adapter does not fit {type(model).__name__}: {wrong[0]} is {there[0]} in the adapter and {there[1]} in the model "
            f"({len(wrong)} tensors differ). Load it with the base that it was trained on."
        )
    for name, tensor in weights:
        target = parameters[names[name]]
        target.copy_(sharded_like(tensor.to(target.dtype), target))


def load_adapter(model: nn.Module, own: AdapterSpec, path: str) -> None:
    """Load a PEFT directory into a model that trains an adapter of the same description.

    Raises:
        ConfigError: there is no adapter at ``path``, or it has another description.
    """
    if not is_adapter(path):
        raise ConfigError(
            f"{path} is no directory of an adapter ({CONFIG_FILE}), and this engine trains an adapter over its base."
        )
    try:
        stream = read_stream(path)
        assert stream.adapter is not None
        refuse_other_adapter(stream.adapter.to_peft(), own)
        fill_adapter(model, stream)
    except (CheckpointError, WeightUpdateError) as error:
        raise ConfigError(f"{path} cannot be loaded: {error}") from error


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """Merge a model's adapter into its weights in place, and remove PEFT's layers. For export only.

    Returns:
        The model.
    """
    for name, layer in _adapted(model):
        layer.merge()
        model.set_submodule(name, layer.base_layer)
    return model


class BasePolicy:
    """The policy before training: the trained model with its adapter off. It has no weights of its own.

    Args:
        model: the trained model.
        score: ``TrainEngine.compute_logp`` of its engine.
    """

    def __init__(self, model: nn.Module, score: Callable[..., Tensor]) -> None:
        self._model, self._score = model, score

    def compute_logp(self, batch: Trajectory, *, loss_tokens_only: bool = False) -> Tensor:
        """See ``TrainEngine.compute_logp``."""
        with adapter_off(self._model):
            return self._score(batch, loss_tokens_only=loss_tokens_only)

    def destroy(self) -> None:
        """Do nothing, because the engine owns the weights."""


def refuse_other_adapter(saved: Mapping[str, Any] | None, own: AdapterSpec | None) -> None:
    """Reject a recovery checkpoint of another adapter, or of a model that was trained whole.

    Args:
        saved: the checkpoint's adapter in PEFT's form. If None, the checkpoint holds whole weights.
        own: the engine's adapter. None if the model is trained whole.

    Raises:
        CheckpointError: they differ; the message names what.
    """
    if saved is None and own is None:
        return
    if saved is None or own is None:
        held, trained = (
            ("an adapter", "all weights") if own is None else ("all weights of a model", f"an adapter of rank {own.rank}")
        )
        raise CheckpointError(
            f"The checkpoint holds {held}, and this run trains {trained}: set lora as in the run that wrote it, or another trial_name."
        )
    before = AdapterSpec.from_peft(saved)
    compared = {
        "rank": (before.rank, own.rank),
        "alpha": (before.alpha, own.alpha),
        "targets": (", ".join(sorted(before.targets)), ", ".join(sorted(own.targets))),
        "use_rslora": (before.use_rslora, own.use_rslora),
        "use_dora": (before.use_dora, own.use_dora),
    }
    if wrong := [f"lora.{name} is {there} there and {here} here" for name, (there, here) in compared.items() if there != here]:
        raise CheckpointError(
            f"The checkpoint is of another adapter: {'; '.join(wrong)}. Set it as there, or another trial_name."
        )
    if before.base != own.base:
        logger.warning("The checkpoint's adapter was trained on %s, and is loaded over %s.", before.base, own.base)
