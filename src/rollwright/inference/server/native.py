"""SGLang's native protocol: ``/generate``."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse, version_spans
from rollwright.inference.routed_experts import int32_of_record
from rollwright.inference.server.adapter_routes import AdapterRoutes
from rollwright.inference.server.bodies import Generate, NativeSampling
from rollwright.inference.server.exchange import (
    RequestError,
    Routes,
    beside_the_loop,
    error_event,
    event_line,
    event_stream,
    read_object,
    while_connected,
)
from rollwright.inference.server.prompts import PromptReader
from rollwright.inference.server.text_stream import completion_text


@dataclass
class _Completion:
    """One completion of a parsed ``/generate``, and the options of its answer."""

    request: ModelRequest
    keep_stop: bool
    return_logprob: bool
    body: Generate
    samples: bool = True  # False only scores the prompt


class NativeProtocol:
    """``/generate`` over an engine.

    Args:
        engine: answers the requests.
        tokenizer: encodes ``text`` and decodes answers. None serves token ids only.
        adapters: adapters that requests can name.
        max_prompt_tokens: maximum length of a prompt. None sets no limit besides the context.
        max_samples: maximum number of completions for one request.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        adapters: AdapterRoutes,
        *,
        max_prompt_tokens: int | None = None,
        max_samples: int = 256,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._adapters = adapters
        self._reader = PromptReader(tokenizer, engine.context_length, max_prompt_tokens, max_samples)

    @property
    def router(self) -> Routes:
        """The route."""
        return Routes((method, "/generate", self._generate, Generate) for method in ("POST", "PUT"))

    async def _generate(self, request: Request) -> Response:
        body, size = await read_object(request)
        completions, as_list = await beside_the_loop(request, size, self._parse, body)
        if completions[0].body.stream:
            return await event_stream(request, self._events(completions[0]))
        work = self.engine.agenerate_batch([completion.request for completion in completions])
        answers = list(map(self._answer, completions, await while_connected(request, work)))
        return JSONResponse(answers if as_list else answers[0])

    def _parse(self, given: dict[str, Any]) -> tuple[list[_Completion], bool]:
        """Parse a body.

        Returns:
            The requested completions, and whether the answer is a list.
        """
        body = Generate.of(given)
        if body.return_routed_experts and not self.engine.records_experts:
            raise RequestError(
                "return_routed_experts: this server records no experts; start it with --enable-return-routed-experts.",
                param="return_routed_experts",
            )
        prompts, as_list = self._prompts(body)
        samplings = [NativeSampling.of(params or {}) for params in _one_each(body, "sampling_params", len(prompts))]
        asked = sum(sampling.n for sampling in samplings)
        self._reader.check_number(asked, "sampling_params")
        as_list = as_list or asked > 1
        if as_list and body.stream:
            raise RequestError("stream is served for one prompt with n=1.", param="stream")
        body.rid = body.rid or uuid.uuid4().hex
        rids = _one_each(body, "rid", len(prompts))
        if isinstance(body.rid, str) and len(prompts) > 1:
            rids = [f"{rid}_{index}" for index, rid in enumerate(rids)]
        completions = []
        names = ("return_logprob", "top_logprobs_num", "logprob_start_len", "lora_path")
        options = (_one_each(body, name, len(prompts)) for name in names)
        for prompt, sampling, rid, return_logprob, top, start, lora in zip(prompts, samplings, rids, *options, strict=True):
            gconfig, start = sampling.gconfig(), -1 if start is None else start
            if gconfig.max_new_tokens == 0 and start < 0:
                raise RequestError(
                    "max_new_tokens=0 samples nothing: it only scores a prompt, with return_logprob and logprob_start_len.",
                    param="max_new_tokens",
                )
            if start >= len(prompt):
                raise RequestError(f"logprob_start_len={start} is not in a prompt of {len(prompt)}.", param="logprob_start_len")
            for index in range(sampling.n):
                request = ModelRequest(
                    input_ids=prompt,
                    gconfig=gconfig.new(
                        n_samples=1,
                        max_new_tokens=max(1, gconfig.max_new_tokens),
                        seed=None if gconfig.seed is None else gconfig.seed + index,
                    ),
                    rid=rid,
                    tokenizer=self.tokenizer,
                    position_ids=body.position_ids,
                    branch_ids=body.branch_ids,
                    top_logprobs=top if return_logprob else None,
                    prompt_logprobs_from=start if return_logprob and start >= 0 else None,
                )
                request = self._adapters.assign(request, lora, "lora_path")
                completions.append(
                    _Completion(request, sampling.no_stop_trim, bool(return_logprob), body, samples=gconfig.max_new_tokens > 0)
                )
        return completions, as_list

    def _prompts(self, body: Generate) -> tuple[list[list[int]], bool]:
        """Return the token ids of the prompts, and whether the prompts were given as a list."""
        given: Any = body.input_ids if body.text is None else body.text
        is_batch = isinstance(given, list) and not isinstance(given[0], int)
        prompts: list[Any] = given if is_batch else [given]
        self._reader.check_number(len(prompts), "text" if body.input_ids is None else "input_ids")
        if body.text is None:
            return [self._reader.checked(prompt, "input_ids") for prompt in prompts], is_batch
        if self.tokenizer is None:
            raise RequestError("This server has no tokenizer; give input_ids.", param="text")
        return [self._reader.encode(text, "text") for text in prompts], is_batch

    def _answer(self, completion: _Completion, response: ModelResponse, *, final: bool = True) -> dict[str, Any]:
        """Build an answer in SGLang's form; ``final`` is False for all chunks of a stream but the last."""
        request, body = completion.request, completion.body
        response = response if completion.samples else response.of_the_prompt()
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
        text = ""
        if completion.return_logprob:
            meta |= self._scores(request, response, body.return_text_in_logprobs)
        if body.return_routed_experts and final and response.routed_experts is not None:
            meta["routed_experts"] = int32_of_record(response.routed_experts)
        if body.return_prompt_token_ids:
            meta["prompt_token_ids"] = request.input_ids
        if self.tokenizer is not None:
            text = completion_text(
                self.tokenizer,
                response.output_tokens,
                skip_special_tokens=request.gconfig.skip_special_tokens,
                stop_match=None if completion.keep_stop else response.stop_match,
            )
        return {"text": text, "output_ids": response.output_tokens, "meta_info": meta}

    def _scores(self, request: ModelRequest, response: ModelResponse, with_texts: bool) -> dict[str, Any]:
        """Build SGLang's entries ``[log-probability, token, text or null]``; the prompt's first token has no log-probability."""

        def entry(logprob: float | None, token: int) -> tuple[float | None, int, str | None]:
            return logprob, token, self.tokenizer.decode([token]) if with_texts and self.tokenizer else None

        def entries(tops: list[Any]) -> list[Any]:
            return [top and [entry(logprob, token) for token, logprob in top] for top in tops]

        scores: dict[str, Any] = {"output_token_logprobs": list(map(entry, response.output_logprobs, response.output_tokens))}
        if response.output_top_logprobs is not None:
            scores["output_top_logprobs"] = entries(response.output_top_logprobs)
        if response.input_logprobs is not None:
            tokens = request.input_ids[request.prompt_logprobs_from :]
            scores["input_token_logprobs"] = list(map(entry, [None, *response.input_logprobs[1:]], tokens))
        if response.input_top_logprobs is not None:
            scores["input_top_logprobs"] = entries([None, *response.input_top_logprobs[1:]])
        return scores

    async def _events(self, completion: _Completion) -> AsyncGenerator[str, None]:
        latest: ModelResponse | None = None
        async with contextlib.aclosing(self.engine.astream(completion.request)) as partials:
            try:
                async for partial in partials:
                    if latest is not None:
                        yield event_line(self._answer(completion, latest, final=False))
                    latest = partial
                assert latest is not None
                yield event_line(self._answer(completion, latest))
                yield "data: [DONE]\n\n"
            except Exception as error:
                if latest is None:
                    raise  # the response gets an error status
                yield error_event(error)


def _one_each(body: Generate, name: str, count: int) -> list[Any]:
    """Return a field's value for each prompt; the field holds a list of values, or one value for all prompts."""
    value = getattr(body, name)
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{len(value)} {name} for {count} prompts.", param=name)
    return value


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
