"""Convert between the weight names of a Hugging Face model and those of its checkpoints.

They differ: transformers stacks a layer's experts, which checkpoints store separately, and renames other tensors. **Weights that leave
a process have the names and shapes that** ``save_pretrained`` **writes** (``as_published``), because servers load checkpoints; an engine
in the trainer's process gets the model's own tensors under their own names. The built-in engine accepts both (``as_own``).

Private parts of transformers are imported only in ``_conversions``.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rollwright.errors import WeightUpdateError
from rollwright.inference.weights.stream import WeightStream


@functools.cache
def _conversions() -> Any:
    """Import transformers' checkpoint conversions.

    Raises:
        WeightUpdateError: this version of transformers does not have them.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
            revert_weight_conversion,
        )
    except ImportError as error:
        import transformers

        raise WeightUpdateError(
            f"transformers {transformers.__version__} converts weight names in a way that this version of rollwright does not "
            f"support ({error}): install a version that pyproject.toml allows."
        ) from error
    return SimpleNamespace(
        mapping=get_model_conversion_mapping,
        converter=WeightConverter,
        renaming=WeightRenaming,
        natural_key=dot_natural_key,
        rename=rename_source_key,
        revert=revert_weight_conversion,
    )


# -- from a model to its checkpoint ------------------------------------------------------------------------------------


def as_published(model: Any, weights: WeightStream) -> WeightStream:
    """Convert a model's weights to the names and shapes that ``save_pretrained`` writes.

    Most tensors are only renamed. Tensors that are split or merged are converted one layer at a time, which avoids a second copy of
    the model.

    Args:
        model: a Hugging Face model; weights of other models, and adapters, which have PEFT's names, are returned unchanged.
        weights: its tensors under their own names.

    Raises:
        WeightUpdateError: transformers cannot convert them.
    """
    if not hasattr(model, "_keys_to_ignore_on_save") or weights.adapter is not None:
        return weights
    names = {name: _saved_name(model, name) for name, _ in weights.described}
    described = {names[own]: t for own, t in weights.described if own not in (model._keys_to_ignore_on_save or ())}
    own_names = {id(tensor): name for name, tensor in described.items()}
    published = _reverted(model, described)
    renamed = {own_names[id(tensor)]: name for name, tensor in published.items() if id(tensor) in own_names}
    if renamed == {name: name for name in names}:
        return weights
    groups: dict[str, list[str]] = {}
    for name in described:
        if name not in renamed:
            groups.setdefault(_layer_of(name), []).append(name)
    alone = [_reverted(model, {name: described[name] for name in members}) for members in groups.values()]
    if _shapes(_joined(alone)) != _shapes({name: t for name, t in published.items() if id(t) not in own_names}):
        groups = {"": [name for name in described if name not in renamed]}  # conversions across layers
    together = {name: members for members in groups.values() for name in members}

    def converted(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        waiting: dict[str, dict[str, Tensor]] = {}
        for own, tensor in pairs:
            name = names[own]
            if name in renamed:
                yield renamed[name], tensor
            elif name in together:
                members = together[name]
                group = waiting.setdefault(members[0], {})
                group[name] = tensor
                if len(group) == len(members):
                    yield from _reverted(model, waiting.pop(members[0])).items()

    return WeightStream(converted(weights.described), lambda: converted(weights))


def _saved_name(model: Any, name: str) -> str:
    """Return the name of a tensor in checkpoints, which store a tied tensor under only one of its names."""
    saved = (getattr(model, "all_tied_weights_keys", None) or {}).get(name, name)
    try:
        is_tied = saved == name or model.get_parameter(saved) is model.get_parameter(name)
    except AttributeError:
        return name
    return saved if is_tied else name


def _reverted(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        with torch.no_grad():
            return _conversions().revert(model, weights)
    except (ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise WeightUpdateError(
            f"transformers cannot convert weights such as {next(iter(weights))} of {type(model).__name__} to the checkpoint format "
            f"that servers load: {error}"
        ) from error


def _layer_of(name: str) -> str:
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else name


def _joined(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}


# -- from a checkpoint to a model --------------------------------------------------------------------------------------


@dataclass
class CheckpointKeys:
    """Mapping from a checkpoint's keys to a model's tensors.

    Attributes:
        direct: key -> name of the model's tensor, for keys that hold exactly one tensor of the model.
        converted: first name in the model -> the keys that transformers converts to it (such as experts, which it stacks), with
            their pattern and converter.
        transforms: transformers' conversions for checkpoints of this model.
    """

    model: Any
    direct: dict[str, str] = field(default_factory=dict)
    converted: dict[str, list[tuple[str, str, Any]]] = field(default_factory=dict)
    transforms: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, model: Any, keys: Iterable[str]) -> CheckpointKeys:
        """Map ``keys``. Unknown keys become ``direct``, with the name that they would have in the model."""
        private = _conversions()
        found = cls(model, transforms=private.mapping(model))
        renamings = [each for each in found.transforms if isinstance(each, private.renaming)]
        converters = [each for each in found.transforms if isinstance(each, private.converter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        state, prefix = model.state_dict(keep_vars=True), model.base_model_prefix
        for key in sorted(keys, key=private.natural_key):  # some renamings depend on the order of the keys
            name, pattern = private.rename(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = key, None
            if pattern is None:
                found.direct[key] = name
            else:
                found.converted.setdefault(name, []).append((key, pattern, by_pattern[pattern]))
        return found

    def remember(self) -> None:
        """Make ``save_pretrained`` and ``as_published`` write the names that were read, as after ``from_pretrained``."""
        self.model._weight_conversions = [each for each in self.transforms if each.was_used()]

    def convert(self, name: str, tensor_of: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Convert one entry of ``converted`` to named tensors of the model.

        Args:
            name: key of the entry.
            tensor_of: returns the tensor of a checkpoint key.
        """
        sources = self.converted[name]
        converter = copy.deepcopy(sources[0][2])
        for key, pattern, _ in sources:
            converter.add_tensor(name, key, pattern, tensor_of(key))
        for target, tensor in converter.convert(name, model=self.model, config=self.model.config).items():
            yield target, tensor[0] if isinstance(tensor, list) else tensor


class IncompleteWeightsError(WeightUpdateError):
    """Some of the tensors that a model merges into one are missing (so far)."""


def as_own(model: Any, weights: WeightStream) -> WeightStream:
    """Convert weights, named as in the model or as in its checkpoints, to the model's own names.

    Unknown names are unchanged. Tensors that the model merges into one are buffered until all of them have arrived.

    Raises:
        IncompleteWeightsError: some of the tensors to merge are missing or have another shape.
    """
    state = model.state_dict(keep_vars=True)
    if all(name in state for name, _ in weights.described) or not hasattr(model, "_keys_to_ignore_on_save"):
        return weights
    keys = CheckpointKeys.of(model, (name for name, _ in weights.described))
    entry_of = {key: name for name, sources in keys.converted.items() for key, _, _ in sources}

    def converted(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        waiting: dict[str, dict[str, Tensor]] = {}
        for key, tensor in pairs:
            if key in keys.direct:
                yield keys.direct[key], tensor
                continue
            name = entry_of[key]
            group = waiting.setdefault(name, {})
            group[key] = tensor
            if len(group) == len(keys.converted[name]):
                del waiting[name]
                made = _made_of(keys, name, group)
                if wrong := next((own for own, t in made.items() if own in state and t.shape != state[own].shape), None):
                    raise IncompleteWeightsError(
                        f"{len(group)} weights such as {key} merge into {wrong} of shape {tuple(made[wrong].shape)}, but {type(model).__name__} "
                        f"has {tuple(state[wrong].shape)}: some are missing, or they belong to another model."
                    )
                yield from made.items()

    return WeightStream(converted(weights.described), lambda: converted(weights))


def _made_of(keys: CheckpointKeys, name: str, group: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        return dict(keys.convert(name, group.__getitem__))
    except (ValueError, RuntimeError, KeyError, IndexError) as error:
        raise IncompleteWeightsError(
            f"{len(group)} weights such as {next(iter(group))} do not merge into {name} of {type(keys.model).__name__}: some are missing, or they "
            f"belong to another model ({error})."
        ) from error
