"""From a request to a sequence: what the engine cannot serve as asked is refused here, before it is queued."""

from __future__ import annotations

import random
from typing import Any

from rollwright.errors import EngineError, PromptTooLongError
from rollwright.inference.backends.builtin.forward_batch import hidden_columns
from rollwright.inference.backends.builtin.model_runner import ModelRunner
from rollwright.inference.backends.builtin.request_checks import check_layout, check_media, check_sampling
from rollwright.inference.backends.builtin.sequence import Sequence
from rollwright.inference.backends.builtin.stop import StopStrings
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
        check_sampling(gconfig)
        check_layout(request, self._runner.context_length)
        check_media(request, self._runner.takes_multi_modal, type(self._runner.model).__name__)
        tokenizer = request.tokenizer or self._tokenizer
        if gconfig.stop and tokenizer is None:
            raise EngineError("Stop strings need a tokenizer: give one to the engine or set request.tokenizer.")
        possible = {i for i in gconfig.stop_token_ids if 0 <= i < self._runner.vocabulary}  # what is no token ends nothing
        stop_ids = possible - self._end_ids if gconfig.ignore_eos else possible
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
