"""Which module samples and which one is scored, behind the wrappers that training puts around a model.

* DDP and ``torch.compile`` wrappers are taken off; gradients then stay on this process, unreduced.
* A ``PeftModel`` is used as it is: its adapters stay in place, and the engine runs it by the model's own forward. Nothing is
  merged, as a merged weight rounds differently and a merged copy would not follow the training.
* An FSDP model holds a shard of its parameters on each process. To generate and to score without gradients it is gathered
  into a plain copy, on every process, for the time of the call; gradients go through the wrapped model itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rollwright.errors import ConfigError


def is_sharded(model: nn.Module) -> bool:
    """True where FSDP (1 or 2) keeps a shard of the parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def unwrapped(model: nn.Module) -> Any:
    """The Hugging Face model inside DDP, FSDP, ``torch.compile`` and PEFT wrappers.

    Raises:
        ConfigError: the adapter is a learned prompt, which the model does not hold, or this is no Hugging Face model.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            if getattr(model.active_peft_config, "is_prompt_learning", False):  # type: ignore[attr-defined]
                raise ConfigError(
                    f"The adapter is of type {model.active_peft_config.peft_type}, a learned prompt beside the model, which "  # type: ignore[attr-defined]
                    "the built-in engine does not compute: use LoRA or another adapter of the model's own layers."
                )
            model = model.get_base_model()  # type: ignore[operator]
        else:
            break
    if not hasattr(model, "config"):
        raise ConfigError(f"{type(model).__name__} has no config: give a Hugging Face causal language model.")
    return model


class _WholeForward(nn.Module):
    """A model of which only its own forward may be called, so that the hooks of FSDP on it run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def module_with_gradients(model: nn.Module) -> nn.Module:
    """What is scored so that gradients reach the caller's parameters."""
    return _WholeForward(model) if is_sharded(model) else unwrapped(model)


@contextmanager
def plain_model(model: nn.Module) -> Iterator[Any]:
    """The Hugging Face model with all its weights here, in evaluation mode while the context lasts.

    Raises:
        ConfigError: an FSDP model carries adapters.
    """
    inner = unwrapped(model)
    if is_sharded(model):
        inner = _gathered(model, inner)
    with evaluation_mode(inner):
        yield inner


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off while the context lasts: log-probabilities are those of the distribution that was sampled."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _gathered(model: nn.Module, inner: Any) -> nn.Module:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    if any("lora_" in name for name, _ in inner.named_parameters()):
        raise ConfigError("An FSDP model with adapters cannot be gathered: generate with the PeftModel before it is sharded.")
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    copy = _class_of(inner)._from_config(inner.config, dtype=inner.dtype)
    copy.to(next(iter(weights.values())).device)  # type: ignore[union-attr]
    copy.load_state_dict(weights)
    return copy.eval()


def _class_of(inner: Any) -> Any:
    """The model's class; FSDP2 puts one of its own in front of it."""
    from torch.distributed.fsdp import FSDPModule

    return next(cls for cls in type(inner).__mro__ if not issubclass(cls, FSDPModule))
