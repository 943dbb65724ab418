"""SGLang's native protocol: ``/generate``."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse, version_spans
from rollwright.inference.server.errors import RequestError, as_request_error, error_body, error_response
from rollwright.inference.server.exchange import ClientGoneError, beside_the_loop, event_line, read_object, while_connected
from rollwright.inference.server.native_fields import check_request, generation_arguments
from rollwright.inference.server.text_stream import completion_text


@dataclass
class _Completion:
    """One completion of a parsed ``/generate``, and how its answer is written."""

    request: ModelRequest
    keep_stop: bool
    return_logprob: bool
    token_texts: bool
    prompt_token_ids: bool


@dataclass
class _Generation:
    """A parsed ``/generate``."""

    completions: list[_Completion]
    as_list: bool
    stream: bool

    @property
    def requests(self) -> list[ModelRequest]:
        """What the engine is asked."""
        return [completion.request for completion in self.completions]


class NativeProtocol:
    """``/generate`` over an engine."""

    def __init__(
        self, engine: InferenceEngine, tokenizer: Any, *, max_prompt_tokens: int | None = None, max_samples: int = 256
    ) -> None:
        """Args:
        engine: answers the requests.
        tokenizer: encodes ``text`` and decodes answers; None: ids only.
        max_prompt_tokens: a longer prompt is refused.
        max_samples: most completions of one request.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._max_samples = max_samples

    @property
    def router(self) -> APIRouter:
        """The route."""
        router = APIRouter()
        router.add_api_route("/generate", self._generate, methods=["POST", "PUT"], response_model=None)
        return router

    async def _generate(self, request: Request) -> Response:
        try:
            body = await read_object(request)
            generation = await beside_the_loop(len(await request.body()), self._parse, body)
            if generation.stream:
                return await self._stream(request, generation.completions[0])
            responses = await while_connected(request, self.engine.agenerate_batch(generation.requests))
            answers = [
                self.answer(completion, response)
                for completion, response in zip(generation.completions, responses, strict=True)
            ]
        except ClientGoneError:
            return Response(status_code=499)
        except Exception as error:  # every failure becomes a response that says what is wrong
            return error_response(error)
        return JSONResponse(answers if generation.as_list else answers[0])

    def _parse(self, body: dict[str, Any]) -> _Generation:
        check_request(body)
        prompts, is_batch = self._prompts(body)
        count = len(prompts)
        arguments = [generation_arguments(given) for given in _one_each("sampling_params", body, count)]
        asked = sum(gconfig.n_samples for gconfig, _ in arguments)
        if asked > self._max_samples:
            raise self._too_many(asked)
        stream, as_list = bool(body.get("stream")), is_batch or asked > 1
        if as_list and stream:
            raise RequestError("stream is served for one prompt with n=1.", param="stream")
        completions = [
            _Completion(
                self._request(body, prompt, gconfig, rid, index),
                keep_stop,
                bool(return_logprob),
                bool(body.get("return_text_in_logprobs")),
                bool(body.get("return_prompt_token_ids")),
            )
            for prompt, (gconfig, keep_stop), rid, return_logprob in zip(
                prompts, arguments, _rids(body, count), _one_each("return_logprob", body, count), strict=True
            )
            for index in range(gconfig.n_samples)
        ]
        return _Generation(completions, as_list, stream)

    def _request(
        self, body: dict[str, Any], prompt: list[int], gconfig: GenerationHyperparameters, rid: str, index: int
    ) -> ModelRequest:
        seed = None if gconfig.seed is None else gconfig.seed + index
        return ModelRequest(
            input_ids=prompt,
            gconfig=gconfig.new(n_samples=1, seed=seed),
            rid=rid,
            tokenizer=self.tokenizer,
            position_ids=body.get("position_ids"),
            branch_ids=body.get("branch_ids"),
        )

    def _too_many(self, asked: int) -> RequestError:
        return RequestError(
            f"{asked} completions are over the limit of {self._max_samples} (--max-samples); send fewer in one request.",
            param="sampling_params",
        )

    def _prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        ids: Any = body.get("input_ids")
        text = body.get("text")
        if (ids is None) == (text is None):
            raise RequestError("Give either input_ids or text.", param="input_ids")
        is_batch = isinstance(text, list) or (isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))
        given = (ids if text is None else text) if is_batch else [ids if text is None else text]
        if len(given) > self._max_samples:
            raise self._too_many(len(given))
        prompts = given if text is None else self._encoded(given)
        vocabulary = len(self.tokenizer) if self.tokenizer is not None else None
        for prompt in prompts:
            self._check_prompt(prompt, vocabulary)
        return prompts, is_batch

    def _encoded(self, texts: list[Any]) -> list[list[int]]:
        if self.tokenizer is None:
            raise RequestError("This server has no tokenizer; give input_ids.", param="text")
        if not texts or not all(isinstance(text, str) for text in texts):
            raise RequestError("text has to be a text or a list of texts.", param="text")
        prompts = [self.tokenizer.encode(text) for text in texts]
        if not all(prompts):
            raise RequestError("text is empty: there is no token to go on from.", param="text")
        return prompts

    def _check_prompt(self, prompt: Any, vocabulary: int | None) -> None:
        if not isinstance(prompt, list) or not prompt or any(type(token) is not int for token in prompt):
            raise RequestError(
                "input_ids has to be a list of token ids that is not empty, or a list of such lists.", param="input_ids"
            )
        if min(prompt) < 0 or (vocabulary is not None and max(prompt) >= vocabulary):
            raise RequestError(f"input_ids holds ids outside 0 to {(vocabulary or 0) - 1}.", param="input_ids")
        if self._max_prompt_tokens and len(prompt) > self._max_prompt_tokens:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens, longer than the limit of {self._max_prompt_tokens}.", param="input_ids"
            )

    def answer(self, completion: _Completion, response: ModelResponse, *, final: bool = True) -> dict[str, Any]:
        """One answer in SGLang's form; ``final`` is False for the chunks of a stream before the last."""
        request = completion.request
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": _finish_reason(response) if final else None,
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(response.output_tokens),
            "weight_versions": version_spans(response.output_versions),
            "weight_version": str(response.output_versions[-1] if response.output_versions else self.engine.get_version()),
            "e2e_latency": response.latency,
            "ttft": response.ttft,
        }
        if completion.return_logprob:
            texts = [
                self.tokenizer.decode([token]) if completion.token_texts and self.tokenizer else None
                for token in response.output_tokens
            ]
            meta["output_token_logprobs"] = list(zip(response.output_logprobs, response.output_tokens, texts, strict=True))
        if completion.prompt_token_ids:
            meta["prompt_token_ids"] = request.input_ids
        text = ""
        if self.tokenizer is not None:
            text = completion_text(
                self.tokenizer,
                response.output_tokens,
                skip_special_tokens=request.gconfig.skip_special_tokens,
                stop_match=None if completion.keep_stop else response.stop_match,
            )
        return {"text": text, "output_ids": response.output_tokens, "meta_info": meta}

    async def _stream(self, asked: Request, completion: _Completion) -> StreamingResponse:
        partials = self.engine.astream(completion.request)
        first = await while_connected(asked, anext(partials))

        async def events() -> AsyncIterator[str]:
            try:
                latest = first
                async for partial in partials:
                    yield event_line(self.answer(completion, latest, final=False))
                    latest = partial
                yield event_line(self.answer(completion, latest))
                yield "data: [DONE]\n\n"
            except Exception as error:  # the status is sent already: the stream says what is wrong
                refusal = as_request_error(error)
                yield event_line(error_body(str(refusal), kind=refusal.kind, status=refusal.status))
            finally:
                await partials.aclose()

        return StreamingResponse(events(), media_type="text/event-stream")


def _one_each(name: str, body: dict[str, Any], count: int) -> list[Any]:
    """A field that holds one value for all prompts, or a list with one for each."""
    value = body.get(name)
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{len(value)} {name} for {count} prompts.", param=name)
    return value


def _rids(body: dict[str, Any], count: int) -> list[str]:
    """Names of the prompts' conversations: those given, or one given (or made) name, numbered where there are several."""
    rid = body.get("rid") or uuid.uuid4().hex
    if isinstance(rid, list):
        return [str(name) for name in _one_each("rid", body, count)]
    return [str(rid)] if count == 1 else [f"{rid}_{index}" for index in range(count)]


def _finish_reason(response: ModelResponse) -> dict[str, Any]:
    reason: dict[str, Any] = {"type": response.stop_reason}
    if response.stop_reason == "length":
        reason["length"] = len(response.output_tokens)
    elif response.stop_reason == "abort":
        reason["message"] = "aborted"
    elif response.stop_match is not None:
        reason["matched"] = response.stop_match
    elif response.output_tokens:
        reason["matched"] = response.output_tokens[-1]
    return reason
