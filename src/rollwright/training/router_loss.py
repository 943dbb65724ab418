"""Auxiliary load-balancing loss of mixture-of-experts models.

As in transformers, the loss times its coefficient is added if the model's configuration has ``output_router_logits: true``. It is a
product of two means over all tokens of an optimizer step (Switch Transformer, https://arxiv.org/abs/2101.03961, equations 4 to 6), so it
is not a sum over micro-batches or ranks. It takes a separate forward pass over the padded rows, which must fit into one micro-batch.
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
from rollwright.training.fsdp import is_sharded
from rollwright.training.logprobs import model_inputs, refuse_mixed_frequencies

logger = getLogger("training")

#: Names of the coefficient in models and configurations.
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


class RouterLoss:
    """The auxiliary loss of a model's routers.

    Attributes:
        coefficient: weight of the loss; 0 if it is not added.
    """

    def __init__(self, model: nn.Module, max_tokens: int) -> None:
        """
        Args:
            model: the Hugging Face model to train.
            max_tokens: maximum number of padded tokens in a forward pass.

        Raises:
            ConfigError: the model's configuration enables the loss, but the model is sharded or trained by several ranks.
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
                "The routers' auxiliary loss (%g) is not added: as in transformers, it needs output_router_logits: true in the "
                "model's config.json.",
                coefficient,
            )
            return
        if parallel.world_size() > 1 or is_sharded(model):  # FSDP does not unshard a layer for side outputs either
            raise ConfigError(
                f"The model's config.json has output_router_logits: true, so the routers' auxiliary loss ({coefficient:g}) has to be "
                "added. It needs all tokens of a step together, which several ranks or a sharded model do not have: train in one process "
                "with shard: never, or set output_router_logits to false."
            )
        logger.info(
            "The routers' auxiliary loss is added with weight %g, because the model's config.json has output_router_logits: true; it costs "
            "one more pass over each step's rows.",
            coefficient,
        )

    def __call__(self, batch: Trajectory) -> Tensor:
        """Compute the loss of an optimizer step's rows, times the coefficient.

        Raises:
            TrainingError: the rows do not fit into one forward pass or have branches, or the model returns no such loss.
        """
        rows, length = batch["input_ids"].shape
        hint = "or set output_router_logits to false in the model's config.json."
        if rows * length > self._max_tokens:
            raise TrainingError(
                f"The routers' auxiliary loss needs all tokens of an optimizer step in one forward pass, and this step has {rows} rows "
                f"of up to {length} tokens, {rows * length} padded, above mb_spec.max_tokens_per_mb={self._max_tokens}: raise that, "
                f"use smaller batches (or a larger ppo_n_minibatches), {hint}"
            )
        if batch.get("branch_ids") is not None:
            raise TrainingError(f"The routers' auxiliary loss is not defined for rows with branch_ids: leave them out, {hint}")
        refuse_mixed_frequencies(batch, self._model)
        inputs = model_inputs(batch, self._model)
        if batch.get("attention_mask") is not None:  # padding is routed but not counted
            inputs["attention_mask"] = batch["attention_mask"].to(torch.long)
        if "logits_to_keep" in inspect.signature(self._model.forward).parameters:
            inputs["logits_to_keep"] = 1
        loss = getattr(self._model(**inputs, use_cache=False, output_router_logits=True), "aux_loss", None)
        if not isinstance(loss, Tensor):
            raise TrainingError(
                f"{type(self._model).__name__} returns no auxiliary loss although its configuration has output_router_logits: true: set "
                "it to false in the model's config.json."
            )
        return self.coefficient * loss
