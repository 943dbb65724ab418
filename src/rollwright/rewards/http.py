"""Rewards from a service: ``reward_fn: https://host/score`` posts each completion to it and takes the number that it answers.

Settings follow the URL as its fragment, which is not sent: ``https://host/score#form=solution&batch_size=16&timeout=30``.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qsl, urldefrag, urlsplit

import httpx2

from rollwright.errors import RewardError
from rollwright.rewards.score import Score

#: Seconds before the first retry, doubled for each further one up to the maximum.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
#: Statuses after which a request may succeed if it is sent again.
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
#: Fields of an answer that may hold the reward, and those of the answer to a batch.
_REWARD_FIELDS, _BATCH_FIELDS = ("reward", "score"), ("rewards", "scores")
#: Columns that are sent under a name of their own.
_OWN_COLUMNS = ("answer", "data_source", "extra_info")


@dataclass(frozen=True)
class RewardService:
    """How a reward service is asked.

    Attributes:
        url: address of the service.
        form: body of a request: ``response`` or ``solution``; see ``HttpReward``.
        key: field of an answer that holds the reward. Empty: ``reward`` or ``score``.
        batch_size: maximum number of completions in one request.
        batch_seconds: time that an incomplete batch waits for further completions.
        timeout: time limit of one attempt, in seconds.
        retries: how often a request is sent again after a timeout, a lost connection, or status 408, 425, 429 or 5xx.
        token_variable: environment variable whose value is sent as a bearer token. Empty: no token.

    Raises:
        RewardError: a setting is out of range.
    """

    url: str
    form: str = "response"
    key: str = ""
    batch_size: int = 1
    batch_seconds: float = 0.05
    timeout: float = 60.0
    retries: int = 4
    token_variable: str = ""

    def __post_init__(self) -> None:
        if self.form not in _BODIES:
            raise RewardError(f"reward service {self.url}: form={self.form!r}; it has to be {' or '.join(_BODIES)}.")
        if (
            not urlsplit(self.url).hostname
            or self.batch_size < 1
            or min(self.batch_seconds, self.retries) < 0
            or self.timeout <= 0
        ):
            raise RewardError(
                f"reward service {self.url}: the URL needs a host, batch_size is at least 1, batch_seconds and retries are at least "
                "0, and timeout is above 0."
            )
        if self.token_variable and not os.environ.get(self.token_variable):
            raise RewardError(f"reward service {self.url}: the environment variable {self.token_variable} is not set.")

    @classmethod
    def of_url(cls, url: str) -> RewardService:
        """Read the settings in a URL's fragment.

        Raises:
            RewardError: a setting is unknown, or its value has another type.
        """
        address, fragment = urldefrag(url)
        kinds = {each.name: type(each.default) for each in fields(cls) if each.name != "url"}
        given: dict[str, Any] = {}
        for name, value in parse_qsl(fragment, keep_blank_values=True):
            if name not in kinds:
                raise RewardError(f"reward service {address}: there is no setting {name!r}; there are {', '.join(kinds)}.")
            try:
                given[name] = kinds[name](value)
            except ValueError:
                raise RewardError(
                    f"reward service {address}: {name}={value!r} is not of type {kinds[name].__name__}."
                ) from None
        return cls(address, **given)


@dataclass
class _Batch:
    """Bodies that wait to be sent, each with the future of its reward."""

    waiting: list[tuple[dict[str, Any], asyncio.Future[float]]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class HttpReward:
    """A reward function that a service computes.

    The body of a request depends on ``form``. Columns of the row that JSON cannot represent are left out.

    * ``response``: ``prompt``, ``response``, ``label`` (the row's ``answer``) and ``metadata`` (the row's other columns).
    * ``solution``: ``data_source``, ``solution_str``, ``ground_truth`` (the row's ``answer``) and ``extra_info`` (the row's other columns
      and ``prompt``).

    The answer is a number, or an object that holds it as ``reward``, ``score`` or ``key``; the object's other numbers and texts are kept
    with the sample. If ``batch_size`` is above 1, bodies and answers are lists; the answer may also be an object that holds its list as
    ``rewards``, ``scores`` or ``key``.

    Args:
        service: settings, or a URL with the settings in its fragment.
    """

    #: ``AsyncRewardWrapper`` leaves the time limit and retries to this function.
    limits_itself = True

    def __init__(self, service: RewardService | str) -> None:
        self.service = RewardService.of_url(service) if isinstance(service, str) else service
        self.__qualname__ = f"HttpReward({self.service.url})"  # for messages and the journal
        # Clients and futures belong to the event loop that they were first used on.
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx2.AsyncClient] = weakref.WeakKeyDictionary()
        self._batches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Batch] = weakref.WeakKeyDictionary()
        self._requests: set[asyncio.Task[None]] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return HttpReward, (self.service,)

    async def __call__(
        self, prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **columns: Any
    ) -> float:
        """Return the reward of one completion.

        Raises:
            RewardError: the service refused, kept failing, or answered without a finite number.
        """
        body = _BODIES[self.service.form](prompt, completion, columns)
        if self.service.batch_size == 1:
            return self._reward_in(await self._post(body))
        loop = asyncio.get_running_loop()
        batch, future = self._batches.setdefault(loop, _Batch()), loop.create_future()
        batch.waiting.append((body, future))
        if len(batch.waiting) >= self.service.batch_size:
            self._send(batch)
        elif batch.timer is None:
            batch.timer = loop.call_later(self.service.batch_seconds, self._send, batch)
        return await future

    # -- batches -------------------------------------------------------------------------------------------------------

    def _send(self, batch: _Batch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        waiting, batch.waiting, batch.timer = batch.waiting, [], None
        waiting = [(body, future) for body, future in waiting if not future.done()]  # others were cancelled
        if waiting:
            request = asyncio.get_running_loop().create_task(self._answer(waiting))
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)

    async def _answer(self, waiting: list[tuple[dict[str, Any], asyncio.Future[float]]]) -> None:
        try:
            answer = await self._post([body for body, _ in waiting])
            names = (self.service.key, *_BATCH_FIELDS)
            answers = (
                next((answer[name] for name in names if name in answer), answer) if isinstance(answer, Mapping) else answer
            )
            if not isinstance(answers, list) or len(answers) != len(waiting):
                raise self._error(f"answered {_shown(answer)} to a batch of {len(waiting)}; it has to answer a list of as many")
            outcomes: list[Any] = [self._outcome(each) for each in answers]
        except BaseException as error:
            outcomes = [error] * len(waiting)
        for (_, future), outcome in zip(waiting, outcomes, strict=True):
            if future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            elif isinstance(outcome, BaseException):
                future.cancel()
            else:
                future.set_result(outcome)

    def _outcome(self, answer: Any) -> float | RewardError:
        try:
            return self._reward_in(answer)
        except RewardError as error:
            return error

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _post(self, body: Any) -> Any:
        """Post a body, again after failures that may pass, and return the answer's JSON."""
        content = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        headers, pause = {"Content-Type": "application/json"}, _FIRST_PAUSE
        for attempt in range(self.service.retries + 1):
            try:
                response = await self._client().post(self.service.url, content=content, headers=headers)
            except httpx2.TransportError as error:
                failure = f"did not answer ({type(error).__name__}: {error})"
            else:
                if response.is_success:
                    return self._json(response)
                failure = f"answered {response.status_code}: {response.text[:300]}"
                if response.status_code not in _TEMPORARY:
                    raise self._error(failure)
                pause = max(pause, _seconds_asked(response))
            if attempt < self.service.retries:
                await asyncio.sleep(min(pause, _LONGEST_PAUSE))
                pause *= 2
        raise self._error(f"{failure}, in each of {self.service.retries + 1} attempts")

    def _client(self) -> httpx2.AsyncClient:
        loop, service = asyncio.get_running_loop(), self.service
        if loop not in self._clients:
            self._clients[loop] = httpx2.AsyncClient(
                timeout=service.timeout,
                headers={"Authorization": f"Bearer {os.environ[service.token_variable]}"} if service.token_variable else {},
                limits=httpx2.Limits(max_connections=256, max_keepalive_connections=64),
                trust_env=urlsplit(service.url).hostname not in _LOOPBACK,  # a proxy would not reach this machine
            )
        return self._clients[loop]

    def _json(self, response: httpx2.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise self._error(f"answered no JSON: {response.text[:300]!r}") from None

    def _reward_in(self, answer: Any) -> float:
        """Return the reward that an answer holds."""
        value = answer
        if isinstance(answer, Mapping):
            names = [self.service.key] if self.service.key else _REWARD_FIELDS
            value = next((answer[name] for name in names if name in answer), None)
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            wanted = self.service.key or " or ".join(_REWARD_FIELDS)
            raise self._error(
                f"answered {_shown(answer)}; it has to be a finite number, or an object that holds one as {wanted}"
            )
        if not isinstance(answer, Mapping):
            return float(value)
        others = {str(name): each for name, each in answer.items() if name not in names}
        parts = {name: float(each) for name, each in others.items() if isinstance(each, int | float) and math.isfinite(each)}
        return Score(float(value), parts, {name: each for name, each in others.items() if isinstance(each, str)})

    def _error(self, what: str) -> RewardError:
        return RewardError(f"the reward service {self.service.url} {what}.")


@functools.lru_cache(maxsize=64)
def reward_at(url: str) -> HttpReward:
    """Return the reward function of a URL; callers of the same URL share its batches and connections."""
    return HttpReward(url)


def _response_body(prompt: str, completion: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {name: value for name, value in _plain(columns).items() if name != "answer"}
    return {"prompt": prompt, "response": completion, "label": _plain(columns).get("answer"), "metadata": metadata}


def _solution_body(prompt: str, completion: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    plain = _plain(columns)
    rest = {name: value for name, value in plain.items() if name not in _OWN_COLUMNS}
    own = plain.get("extra_info")
    extra = {**rest, "prompt": prompt, **(own if isinstance(own, dict) else {})}
    return {
        "data_source": plain.get("data_source"),
        "solution_str": completion,
        "ground_truth": plain.get("answer"),
        "extra_info": extra,
    }


_BODIES = {"response": _response_body, "solution": _solution_body}


def _plain(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that JSON can represent."""
    return {name: value for name, value in columns.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


def _seconds_asked(response: httpx2.Response) -> float:
    """Return the seconds that the service asks to wait; 0 if it does not say."""
    said = response.headers.get("retry-after", "")
    return float(said) if said.isdecimal() else 0.0


def _shown(value: Any) -> str:
    return f"{value!r:.200}"
