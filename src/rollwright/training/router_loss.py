"""The auxiliary loss that keeps a mixture's experts evenly used.

It is added where transformers' own loss adds it: where the model's configuration has ``output_router_logits: true``, times its
coefficient. The loss is that of all tokens of an optimizer step together (Switch Transformer, https://arxiv.org/abs/2101.03961,
equations 4 to 6: a product of two means over tokens), so it is no sum over micro-batches or ranks: it has one forward pass of its
own over the padded rows, and a step whose rows do not fit into one micro-batch is refused.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from rollwright.errors import ConfigError, TrainingError
from rollwright.experience.trajectory import Trajectory
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.logprobs import model_inputs
from rollwright.training.sharding import is_sharded

logger = getLogger("training")

#: What models and configurations call the coefficient.
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


class RouterLoss:
    """The auxiliary loss of a model's routers.

    Attributes:
        coefficient: it is added times this; 0 where it is not.
    """

    def __init__(self, model: nn.Module, max_tokens: int) -> None:
        """Args:
        model: a Hugging Face model that is trained.
        max_tokens: padded tokens of a forward pass.

        Raises:
            ConfigError: the model is sharded or trained by several ranks, and its configuration asks for it.
        """
        self._model, self._max_tokens = model, max_tokens
        config: Any = getattr(model, "config", None)
        text = None if config is None else config.get_text_config()
        found = (getattr(owner, name, None) for owner in (model, text) for name in _COEFFICIENTS)
        coefficient = next((float(value) for value in found if isinstance(value, int | float)), 0.0)
        is_asked_for = bool(getattr(text, "output_router_logits", False) or getattr(config, "output_router_logits", False))
        self.coefficient = coefficient if is_asked_for else 0.0
        if not coefficient:
            return
        if not is_asked_for:
            logger.info(
                "The routers' auxiliary loss (%g) is not added: as in transformers, it is where the model's config.json has "
                "output_router_logits: true.",
                coefficient,
            )
            return
        if parallel.world_size() > 1 or is_sharded(model):  # nor does FSDP unshard a layer for what leaves it beside its output
            raise ConfigError(
                f"The model's config.json has output_router_logits: true, so the routers' auxiliary loss ({coefficient:g}) is to be "
                "added. It is that of all tokens of a step together, which neither several ranks nor a sharded model have: train in one "
                "process with shard: never, or set output_router_logits to false."
            )
        logger.info(
            "The routers' auxiliary loss is added times %g, as the model's config.json says (output_router_logits: true); it costs one "
            "more pass over each step's rows.",
            coefficient,
        )

    def __call__(self, batch: Trajectory) -> Tensor:
        """The loss of an optimizer step's rows, times the coefficient.

        Raises:
            TrainingError: the rows do not fit into one forward pass, have branches, or the model gives no such loss.
        """
        rows, length = batch["input_ids"].shape
        hint = "or set output_router_logits to false in the model's config.json."
        if rows * length > self._max_tokens:
            raise TrainingError(
                f"The routers' auxiliary loss is that of all tokens of an optimizer step together, and this step has {rows} rows of up "
                f"to {length} tokens, {rows * length} padded, above mb_spec.max_tokens_per_mb={self._max_tokens}: raise that, make "
                f"batches smaller (or ppo_n_minibatches larger), {hint}"
            )
        if batch.get("branch_ids") is not None:
            raise TrainingError(f"The routers' auxiliary loss of rows with branch_ids is not known: leave them out, {hint}")
        inputs = model_inputs(batch, self._model)
        if batch.get("attention_mask") is not None:  # padding is routed, and not counted
            inputs["attention_mask"] = batch["attention_mask"].to(torch.long)
        if "logits_to_keep" in inspect.signature(self._model.forward).parameters:
            inputs["logits_to_keep"] = 1
        loss = getattr(self._model(**inputs, use_cache=False, output_router_logits=True), "aux_loss", None)
        if not isinstance(loss, Tensor):
            raise TrainingError(
                f"{type(self._model).__name__} gives no auxiliary loss, though its configuration has output_router_logits: true: set it "
                "to false in the model's config.json."
            )
        return self.coefficient * loss
