"""``/inference/v1/generate``: vLLM's protocol of token ids in and out, as a dialect of completions.

It is for clients that render chats themselves. The OpenAI front records these calls like any others, so a prompt that continues the
tokens of an earlier answer extends the sequence of that answer.
"""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import Request
from pydantic import Field

from rollwright.inference.request import version_spans
from rollwright.inference.server.bodies import Body, TokenIds
from rollwright.inference.server.dialects import ChatProtocol
from rollwright.inference.server.exchange import RequestError, read_object
from rollwright.inference.server.openai_answer import COMPLETION, OpenAICall


class TokensBody(Body):
    """``/inference/v1/generate``."""

    noun = "field of /inference/v1/generate"
    ignored = frozenset(["cache_salt", "priority"])
    neutral: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "features": ((), "the model behind this server reads token ids only"),
        "kv_transfer_params": (({},), "this server moves no caches"),
        "stream": ((False,), "an answer is given whole"),
        "stream_options": ((), "an answer is given whole"),
    }

    token_ids: TokenIds = Field(description="a list of token ids that is not empty")
    sampling_params: dict[str, Any] = Field({}, description="an object")
    model: str | None = None
    request_id: str | None = None


#: Sampling parameters of vLLM that have no effect here: they concern text, which these answers do not have, or features of other models.
_WITHOUT_EFFECT = frozenset(
    [
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        "routed_experts_prompt_start",
    ]
)


async def generate_tokens(protocol: ChatProtocol, request: Request) -> dict[str, Any]:
    """``POST /inference/v1/generate``.

    The ``token_ids`` of a choice include the stop token or the tokens of the stop string. ``logprobs`` adds a log-probability for each
    of them. ``weight_versions`` are spans of tokens with one version.
    """
    body, size = await read_object(request)
    fields = TokensBody.of(body)
    params = {name: value for name, value in fields.sampling_params.items() if name not in _WITHOUT_EFFECT}
    if params.pop("prompt_logprobs", None) is not None:
        raise RequestError("prompt_logprobs cannot be honoured: use /generate or /v1/completions.", param="prompt_logprobs")
    for name in (
        "prompt",
        "model",
        "stream",
        "echo",
        "rid",
        "return_token_ids",
    ):  # fields of a completion, not sampling parameters
        if name in params:
            raise RequestError(f"Unknown sampling parameter {name!r}.", param=name)
    completion = {**params, "prompt": fields.token_ids, "model": fields.model}
    call = await protocol.open_call(request, COMPLETION, completion, size, "gen-")
    await protocol.complete(request, call)
    return {
        "request_id": fields.request_id or call.answer_id,
        "model": protocol.model_name,
        "choices": [_choice(call, index) for index in range(len(call.choices))],
        "prompt_logprobs": None,
    }


def _choice(call: OpenAICall, index: int) -> dict[str, Any]:
    response = call.responses[index]
    choice = {
        "index": index,
        "token_ids": response.output_tokens,
        "finish_reason": response.stop_reason,
        "stop_reason": response.stop_match,
        "weight_versions": version_spans(response.output_versions),
        "logprobs": None,
    }
    if call.logprobs:
        tops = response.output_top_logprobs or [[]] * len(response.output_tokens)

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token_id": token, "token": f"token_id:{token}", "logprob": logprob}

        choice["logprobs"] = {
            "content": [
                entry(token, logprob) | {"top_logprobs": [entry(*other) for other in top or ()]}
                for token, logprob, top in zip(response.output_tokens, response.output_logprobs, tops, strict=True)
            ]
        }
    return choice


TOKENS_ROUTES = (("POST", "/inference/v1/generate", generate_tokens, TokensBody),)
