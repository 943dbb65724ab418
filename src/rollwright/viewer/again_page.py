"""The page that samples one recorded call again, beside the recorded answer. Its POST is the only request that starts anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from rollwright.errors import DataError
from rollwright.tracking.readable import number
from rollwright.viewer.again import Engines, models_of, why_not
from rollwright.viewer.pages import Pages, key_in_address, number_in
from rollwright.viewer.pictures import shade
from rollwright.viewer.run import Run
from rollwright.viewer.sample_view import token_text
from rollwright.viewer.words import title_of


class AgainRequest(BaseModel):
    """Body of a POST: which call of which sample to sample again. Without a sample, the engine is ended."""

    model_config = ConfigDict(extra="forbid")

    sample: str = ""
    call: int = Field(0, ge=0)
    token: int = Field(0, ge=0)
    model: str = ""
    same_seed: bool = False


def add_routes(router: APIRouter, pages: Pages, engines: Engines) -> None:
    """Add the page, and the request that samples."""

    def page(request: Request, name: str, key: str) -> Response:
        run = pages.run(name)
        found = run.sample(key)
        calls = found["calls"]
        call = min(number_in(request, "call"), max(0, len(calls) - 1))
        context = pages.of_run(
            name, run, "/steps", (title_of(found["words"], found["group"]), f"/group/{key_in_address(found['group'])}"),
            (f"Sample {found['index']}", f"/sample/{key_in_address(found['key'])}"), title=f"Request {call + 1} again", is_followed=False,
        )  # fmt: skip
        output = calls[call]["output"] if calls else []
        token = min(number_in(request, "token"), max(0, len(output) - 1))
        here = f"{context['run']['url']}/again/{key_in_address(key)}"
        return pages.page(
            "again.html",
            **context,
            sample=found,
            why="the sample has no request" if not calls else why_not(run),
            models=list(models_of(run)),
            call=call,
            token=token,
            calls=[
                {"text": f"request {each + 1}", "href": f"{here}?{urlencode({'call': each})}", "chosen": each == call}
                for each in range(len(calls))
            ],
            tokens=[
                {**each, "href": f"{here}?{urlencode({'call': call, 'token': place})}", "chosen": place == token}
                for place, each in enumerate(shown_tokens(run, output, calls[call]["logprobs"] if calls else []))
            ],
            reward=found["reward"],
            is_last=call == len(calls) - 1,
        )

    def sample_again(name: str, asked: AgainRequest) -> Response:
        run = pages.run(name)
        if not asked.sample:
            engines.end()
            return Response(status_code=204)
        if why := why_not(run):
            raise DataError(f"this cannot be sampled again: {why}.")
        models = models_of(run)
        if asked.model not in models:
            raise DataError(f"the run has no model {asked.model!r}: it has {', '.join(models) or 'none'}.")
        episode = run.episode(asked.sample)
        if asked.call >= len(episode.calls):
            raise DataError(f"sample {asked.sample} has {len(episode.calls)} requests.")
        recorded = episode.calls[asked.call]
        seed = recorded.call.seed if asked.same_seed else None
        question = {"episode": episode, "call": asked.call, "token": asked.token, "seed": seed}
        answer = engines.ask(run, models[asked.model], question)
        then, now = recorded.output.tolist(), answer["output"]
        parts = next(
            (place for place, (one, other) in enumerate(zip(then, now, strict=False)) if one != other), min(len(then), len(now))
        )
        return pages.page(
            "again_answer.html",
            recorded=_marked(shown_tokens(run, then, recorded.logprobs.tolist()), answer["kept"], parts),
            sampled=_marked(shown_tokens(run, now, answer["logprobs"]), answer["kept"], parts),
            is_equal=then == now,
            answer=answer,
            model=asked.model,
            then=None if episode.end is None else [row.reward for row in episode.end.rows],
        )

    router.add_api_route("/run/{name}/again/{key:path}", page, methods=["GET"], include_in_schema=False, response_model=None)
    router.add_api_route("/run/{name}/again", sample_again, methods=["POST"], include_in_schema=False, response_model=None)


def shown_tokens(run: Run, ids: Sequence[int], logprobs: Sequence[float | None]) -> list[dict[str, Any]]:
    """Return each token with its text, its log-probability and a shade, dark where it was unlikely."""
    return [
        {"text": token_text(text), "value": number(value), "shade": shade(-(value or 0.0), 0.0, 8.0)}
        for text, value in zip(run.texts(ids), logprobs, strict=True)
    ]


def _marked(tokens: Sequence[Mapping[str, Any]], kept: int, parts: int) -> list[dict[str, Any]]:
    return [{**each, "is_kept": place < kept, "parts": place == parts} for place, each in enumerate(tokens)]
