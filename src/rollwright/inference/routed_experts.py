"""The experts that the routers of a mixture-of-experts model choose: recorded while sampling, and used again in training.

Where two experts score nearly alike, an engine and a trainer that round differently choose different ones, and a token passes through other
weights. *Rollout routing replay* (R3, arXiv 2510.11370) makes the trainer use the recorded experts. Their weights still come from the
trainer's own router scores, so that gradients reach the router.

**The record** is a matrix of integers, ``[T, W]``, with one row for each token whose hidden states were computed: all tokens of a request but
the last. ``W`` is ``layers * top_k`` for all layers of the model. An entry is the number of an expert *plus one*; 0 means that nothing
is recorded, as in layers without experts. The type is uint8 if it suffices, otherwise int16.

``Routers.of`` finds the routers by the declaration of their class in transformers, and lets this thread's ``routing`` take part in their
forward passes. How a family turns scores into weights stays its own code: only the result of ``topk`` is replaced. Each class of routers is
checked when it is first used.
"""

from __future__ import annotations

import base64
import functools
import io
import re
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollwright.errors import ConfigError

#: Number of experts, in configurations.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_LAYER = re.compile(r"layers\.(\d+)\.")

_pass = threading.local()


class Routing(Protocol):
    """Takes part in the routers' forward passes of one thread."""

    def route(self, router: Any, own: Callable[[], Any]) -> Any:
        """Return a router's output. ``own`` computes it as the model does."""
        ...


@contextmanager
def routing(how: Routing | None) -> Iterator[None]:
    """Let ``how`` take part in what this thread's routers compute inside the block."""
    before, _pass.how = current_routing(), how
    try:
        yield
    finally:
        _pass.how = before


def current_routing() -> Routing | None:
    """Return the ``Routing`` of this thread, if any. Layers that are recomputed in a backward pass need that of their first pass."""
    return getattr(_pass, "how", None)


def number_of_experts(config: Any) -> int:
    """Return how many experts a model's layers choose from, according to its configuration; 0 for a model without experts."""
    text = config.get_text_config()
    return next((count for name in _EXPERTS if isinstance(count := getattr(text, name, None), int) and count > 1), 0)


@dataclass(frozen=True)
class Routers:
    """The routers of a model.

    Attributes:
        family: the model's type, for messages.
        layers: number of all layers of the model.
        top_k: number of experts that each token is sent to.
        experts: number of experts in a layer.
    """

    family: str
    layers: int
    top_k: int
    experts: int

    @property
    def width(self) -> int:
        """Number of entries of a token."""
        return self.layers * self.top_k

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type of the record."""
        return torch.uint8 if self.experts < 256 else torch.int16

    @classmethod
    def of(cls, model: nn.Module) -> Routers:
        """Find the routers of a Hugging Face model, and let ``routing`` take part in their forward passes from now on.

        Raises:
            ConfigError: the model has no experts, or transformers does not declare their routers in the common form.
        """
        config: Any = model.config
        family, text, experts = config.model_type, config.get_text_config(), number_of_experts(config)
        if not experts:
            raise _refusal(family, "it has no experts")
        kinds = tuple({kind for part in model.modules() for kind in _declared(type(part))})
        found = {name: part for name, part in model.named_modules() if kinds and isinstance(part, kinds)}
        layers = {name: int(at[1]) for name in found if (at := _LAYER.search(name))}
        sizes = {getattr(part, "top_k", None) for part in found.values()}
        if not found or len(set(layers.values())) != len(found) or len(sizes) != 1 or not isinstance(top_k := sizes.pop(), int):
            raise _refusal(
                family, "transformers declares no routers in the common form (one for each layer, with top_k) for it"
            )
        for name, router in found.items():
            router._routed_layer, router._routed_experts = layers[name], experts  # type: ignore[assignment]
            router.forward = types.MethodType(_forward, router)
        return cls(family, int(text.num_hidden_layers), top_k, experts)

    def numbers(self, record: Tensor, layer: int) -> Tensor:
        """Return a layer's part of the record, ``[T, top_k]``."""
        return record[:, layer * self.top_k : (layer + 1) * self.top_k]


def _declared(kind: type) -> list[type]:
    """Return the classes of routers that a class of transformers declares for the output ``router_logits``."""
    declared = (getattr(kind, "_can_record_outputs", None) or {}).get("router_logits")
    each = declared if isinstance(declared, list | tuple) else [declared]
    classes = (getattr(one, "target_class", one) for one in each)
    return [one for one in classes if isinstance(one, type) and issubclass(one, nn.Module)]


def _refusal(family: str, why: str) -> ConfigError:
    return ConfigError(
        f"rollout.routing_replay: the experts of a {family} model cannot be recorded and used again: {why}. Set it to false "
        "(docs/scale.md)."
    )


def _forward(router: Any, *arguments: Any, **keywords: Any) -> Any:
    """Forward pass of a router, with the thread's routing."""
    own = functools.partial(type(router).forward, router, *arguments, **keywords)
    how = current_routing()
    return own() if how is None else how.route(router, own)


# -- recording ---------------------------------------------------------------------------------------------------------


@dataclass
class Recording:
    """Notes what the routers choose in one forward pass.

    Attributes:
        chosen: the experts of each layer that has a router, ``[tokens, top_k]``.
    """

    routers: Routers
    chosen: dict[int, Tensor] = field(default_factory=dict)

    def route(self, router: Any, own: Callable[[], Any]) -> Any:
        """See ``Routing.route``."""
        _check_once(router, own, self.routers)
        output = own()
        self.chosen[router._routed_layer] = output[_place_of_ids(output, self.routers.top_k)]
        return output

    def record(self, unpad: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the record of the pass.

        Args:
            unpad: selects the tokens to record, in order, from ``[tokens, layers, top_k]``.
        """
        some = next(iter(self.chosen.values()))
        record = torch.zeros(len(some), self.routers.layers, self.routers.top_k, dtype=self.routers.dtype, device=some.device)
        for layer, ids in self.chosen.items():
            record[:, layer] = (ids + 1).to(record.dtype)
        return unpad(record).flatten(1)


# -- replay ------------------------------------------------------------------------------------------------------------


@dataclass
class Replay:
    """Sends tokens to the recorded experts; tokens without a record to those that the router chooses.

    Attributes:
        record: ``[T, W]``, of the tokens of a forward pass, in the order in which the model computes them.
    """

    routers: Routers
    record: Tensor

    def route(self, router: Any, own: Callable[[], Any]) -> Any:
        """See ``Routing.route``."""
        _check_once(router, own, self.routers)
        with _Chosen(self.routers.numbers(self.record, router._routed_layer), self.routers.experts):
            return own()


class _Chosen(TorchFunctionMode):
    """Replaces the choice among all experts by the recorded one; the values are those of the chosen entries.

    Args:
        given_Tk: numbers of experts plus one; 0 keeps the router's own choice.
        experts: number of experts.
    """

    def __init__(self, given_Tk: Tensor, experts: int) -> None:
        super().__init__()
        self._given_Tk, self._experts = given_Tk, experts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk) or args[0].shape[-1] != self._experts:
            return found
        if found.indices.shape != self._given_Tk.shape:  # such as the choice of groups
            return found
        given_Tk = self._given_Tk.long()
        ids_Tk = torch.where(given_Tk > 0, given_Tk - 1, found.indices)
        return torch.return_types.topk((args[0].gather(-1, ids_Tk), ids_Tk))  # type: ignore[attr-defined]


# -- the check of a class of routers -----------------------------------------------------------------------------------

_checked: set[type] = set()


def _place_of_ids(output: Any, top_k: int) -> int:
    """Return the place of the chosen experts in a router's output, or -1."""
    parts = output if isinstance(output, tuple) else ()
    places = [
        place
        for place, part in enumerate(parts)
        if isinstance(part, Tensor) and part.dim() == 2 and part.shape[1] == top_k and not part.is_floating_point()
    ]
    return places[0] if len(places) == 1 else -1


@torch.no_grad()
def _check_once(router: Any, own: Callable[[], Any], routers: Routers) -> None:
    """Check on the tokens of a forward pass that a class of routers obeys a choice, and that its weights follow the experts.

    Raises:
        ConfigError: it does not.
    """
    if type(router) in _checked:
        return
    plain = own()
    place = _place_of_ids(plain, routers.top_k)
    if place < 0 or not len(plain[place]):
        if place >= 0:
            return  # no token to check with
        raise _refusal(routers.family, f"{type(router).__name__} does not return the chosen experts as [tokens, top_k]")
    ids_Tk = plain[place].long()

    def with_choice(chosen_Tk: Tensor) -> tuple[Any, ...]:
        with _Chosen(chosen_Tk + 1, routers.experts):
            return own()

    same, turned, others = (with_choice(each) for each in (ids_Tk, ids_Tk.flip(-1), (ids_Tk + 1) % routers.experts))
    alike = all(torch.equal(one, other) for one, other in zip(plain, same, strict=True) if isinstance(one, Tensor))
    obeys = torch.equal(others[place].long(), (ids_Tk + 1) % routers.experts)
    weights = [
        (one, other) for one, other in zip(plain, turned, strict=True) if isinstance(one, Tensor) and one.is_floating_point()
    ]
    weights = [(one, other) for one, other in weights if one.shape == ids_Tk.shape]
    follow = bool(weights) and all(
        torch.allclose(one.flip(-1).float(), other.float(), rtol=1e-2, atol=1e-6) for one, other in weights
    )
    if not (alike and obeys and follow):
        raise _refusal(
            routers.family, f"{type(router).__name__} does not choose its experts and weigh them by one topk over their scores"
        )
    _checked.add(type(router))


# -- what servers return ----------------------------------------------------------------------------------------------


def record_of_int32(encoded: str, tokens: int) -> np.ndarray:
    """Read the record of a request in SGLang's form: the numbers of the experts of all tokens but the last, int32 in base64.

    Args:
        encoded: the text.
        tokens: tokens of prompt and answer together.

    Raises:
        ValueError: the text is not in this form, or belongs to another number of tokens.
    """
    flat = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    if tokens < 2 or len(flat) == 0 or len(flat) % (tokens - 1):
        raise ValueError(
            f"routed_experts has {len(flat)} numbers, which are not the same number for each of {tokens - 1} tokens"
        )
    return as_record(flat.reshape(tokens - 1, -1))


def int32_of_record(record: np.ndarray) -> str:
    """Write a record in SGLang's form; -1 where nothing is recorded."""
    return base64.b64encode((record.astype("<i4") - 1).tobytes()).decode("ascii")


def record_of_npy(encoded: str, tokens: int) -> np.ndarray:
    """Read the record of a request in vLLM's form: ``[tokens - 1, layers, top_k]`` as the bytes of an .npy file in base64.

    Raises:
        ValueError: the text is not in this form, or belongs to another number of tokens.
    """
    experts = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    if experts.ndim != 3 or len(experts) != tokens - 1 or experts.dtype.kind not in "iu":
        raise ValueError(f"routed_experts is {list(experts.shape)} {experts.dtype}, not [{tokens - 1}, layers, top_k] integers")
    return as_record(experts)


def as_record(experts: np.ndarray) -> np.ndarray:
    """Convert numbers of experts, ``[T, layers, top_k]`` or ``[T, W]``, to a record; -1 means that nothing is recorded."""
    flat = experts.reshape(len(experts), -1)
    largest = int(flat.max(initial=0)) + 1
    return (flat.astype(np.int32) + 1).astype(np.uint8 if largest < 256 else np.int16)
