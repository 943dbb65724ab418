"""From a request to a sequence: what the engine cannot serve as asked is refused here, before it is queued."""

from __future__ import annotations

import random
from typing import Any

from rollwright.errors import EngineError, PromptTooLongError
from rollwright.inference.builtin.forward_batch import hidden_columns
from rollwright.inference.builtin.model_runner import ModelRunner
from rollwright.inference.builtin.sequence import Sequence
from rollwright.inference.builtin.stop import StopStrings
from rollwright.inference.request import ModelRequest


class RequestIntake:
    """Checks requests and turns them into sequences.

    Args:
        runner: says what the model can take.
        tokenizer: for stop strings and the end token; may be None.
        seed: of requests that bring none, in order of submission.
    """

    def __init__(self, runner: ModelRunner, tokenizer: Any, seed: int) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._end_ids = _end_token_ids(runner.model, tokenizer)

    def sequence(self, request: ModelRequest) -> Sequence:
        """Check a request and make it a sequence.

        Raises:
            PromptTooLongError: no room for a new token.
            EngineError: the request cannot be served as asked.
        """
        gconfig, length = request.gconfig, len(request.input_ids)
        room = self._runner.context_length - length
        if room < 1:
            raise PromptTooLongError(
                f"The prompt has {length} tokens and the engine's context is {self._runner.context_length} (rid {request.rid}): shorten "
                "the prompt or start the engine with a larger context_length."
            )
        if (largest := max(request.input_ids)) >= self._runner.vocabulary:
            raise EngineError(
                f"input_ids hold {largest}, and the model's vocabulary ends at {self._runner.vocabulary - 1} (rid {request.rid}): "
                "the prompt was encoded by another model's tokenizer."
            )
        for name in ("position_ids", "branch_ids"):
            ids = getattr(request, name)
            if ids is not None and len(ids) != length:
                raise EngineError(f"{name} has {len(ids)} entries for {length} tokens (rid {request.rid}); give one for each.")
        if request.lora_name is not None:
            raise EngineError(
                "The built-in engine serves one set of weights and no named LoRA adapters: leave lora_name unset."
            )
        if request.image_data and not request.multi_modal:
            raise EngineError("The built-in engine takes images as processor outputs in multi_modal, not as image_data.")
        if request.multi_modal and not self._runner.takes_multi_modal:
            raise EngineError(
                f"{type(self._runner.model).__name__} takes text only, and the request carries {sorted(request.multi_modal)}."
            )
        if request.multi_modal and request.branch_ids is not None:
            raise EngineError("A multi-modal request cannot have branches in the built-in engine.")
        tokenizer = request.tokenizer or self._tokenizer
        if gconfig.stop and tokenizer is None:
            raise EngineError("Stop strings need a tokenizer: give one to the engine or set request.tokenizer.")
        stop_ids = {i for i in gconfig.stop_token_ids if not (gconfig.ignore_eos and i in self._end_ids)}
        if not gconfig.ignore_eos:
            stop_ids |= self._end_ids
        seed = gconfig.seed if gconfig.seed is not None else request.seed
        sequence = Sequence(
            request=request,
            tokens=list(request.input_ids),
            prompt_length=length,
            max_new_tokens=min(gconfig.max_new_tokens, room),
            stop_ids=tuple(sorted(stop_ids)),
            seed=self._random.getrandbits(63) if seed is None else seed,
            stop_strings=StopStrings(tokenizer, gconfig.stop) if gconfig.stop else None,
        )
        if request.multi_modal:
            sequence.position_delta = self._runner.multi_modal_position_delta(sequence)
        sequence.hidden = hidden_columns(sequence, self._runner.device)
        return sequence


def _end_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """End tokens by the model's generation config and the tokenizer."""
    generation = getattr(model, "generation_config", None)
    ends = [getattr(generation, "eos_token_id", None), getattr(model.config.get_text_config(), "eos_token_id", None)]
    ends.append(getattr(tokenizer, "eos_token_id", None))
    return {i for end in ends for i in (end if isinstance(end, list) else [end]) if i is not None}
