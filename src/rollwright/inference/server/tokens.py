"""``/inference/v1/generate``: vLLM's protocol of token ids in and out, as a dialect of completions.

Clients that render chats themselves use it, such as the train client of verifiers. At the OpenAI front its calls are recorded
like others, so a prompt that goes on from the tokens of an earlier answer is the same sequence.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from fastapi import Request
from pydantic import Field

from rollwright.inference.request import version_spans
from rollwright.inference.server.bodies import Body, TokenIds
from rollwright.inference.server.exchange import RequestError, read_object
from rollwright.inference.server.openai_answer import OpenAICall


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


#: Sampling parameters of vLLM that change neither what is sampled nor this answer: of its texts, and of what other models return.
_WITHOUT_EFFECT = frozenset(
    [
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        "routed_experts_prompt_start",
    ]
)


class CompletionProtocol(Protocol):
    """What is needed of the protocol that serves completions."""

    model_name: str

    async def open_completion(self, request: Request, completion: dict[str, Any], size: int, prefix: str) -> OpenAICall: ...

    async def complete(self, request: Request, call: OpenAICall) -> None: ...


async def generate_tokens(protocol: CompletionProtocol, request: Request) -> dict[str, Any]:
    """``POST /inference/v1/generate``.

    ``token_ids`` of each choice include the stop token or the tokens of the stop string. With ``logprobs`` each has a
    log-probability; ``weight_versions`` are spans over them.
    """
    body, size = await read_object(request)
    fields = TokensBody.of(body)
    params = {name: value for name, value in fields.sampling_params.items() if name not in _WITHOUT_EFFECT}
    if params.pop("prompt_logprobs", None) is not None:
        raise RequestError("prompt_logprobs cannot be honoured: use /generate or /v1/completions.", param="prompt_logprobs")
    for name in ("prompt", "model", "stream", "echo", "rid", "return_token_ids"):  # of a completion, and no sampling parameters
        if name in params:
            raise RequestError(f"Unknown sampling parameter {name!r}.", param=name)
    completion = {**params, "prompt": fields.token_ids, "model": fields.model}
    call = await protocol.open_completion(request, completion, size, "gen-")
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
