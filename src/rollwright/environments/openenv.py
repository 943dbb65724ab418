"""Environments of OpenEnv servers, played in text over the server's WebSocket, ``/ws``. The package openenv is not needed here."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from rollwright.environments.text_environment import StepResult
from rollwright.errors import ConfigError, LostToolError, WorkflowError
from rollwright.experience.durable import durable
from rollwright.processes.child import UNCOUNTED
from rollwright.registry import import_path

_MESSAGE_BYTES = 100 << 20
_CLOSE_SECONDS = 5.0
_CAPACITY_REACHED = "CAPACITY_REACHED"
#: Refusals of an action after which the environment still runs.
_OF_ACTIONS = ("VALIDATION_ERROR", "EXECUTION_ERROR")


class OpenEnv:
    """One episode in an environment of an OpenEnv server: the text of an observation is a message, a reply is an action.

    Args:
        seed: passed to the server's ``reset``.
        url: address of the server, such as ``http://localhost:8000``.
        action: field of the action that gets the reply; or a function ``(reply, environment) -> action``, or its import path. If the
            function raises ``ValueError``, the reply is invalid, and the model reads the error's message.
        observation: field of the observation that the model reads; or a function ``(observation, environment) -> text``, or its import
            path. Default: the only text of the observation, or else all of it as JSON.
        reset: further arguments of the server's ``reset``.
        on_refusal: ``fail``: an action that the server refuses, or that its environment fails on, fails the sample. ``tell``: the
            reply is invalid, and the model reads what the server said.
        timeout: time limit of each message and its answer, in seconds.
        wait: how long an episode waits for the server if it has no free session, in seconds.

    Attributes:
        shown: the newest observation, as the server sent it; None before the episode begins.

    Raises:
        ConfigError: an argument is invalid.
    """

    instructions = ""

    def __init__(
        self,
        seed: int,
        *,
        url: str,
        action: Callable[[str, OpenEnv], dict[str, Any]] | str = "message",
        observation: Callable[[dict[str, Any], OpenEnv], str] | str = "",
        reset: Mapping[str, Any] | None = None,
        on_refusal: str = "fail",
        timeout: float = 60.0,
        wait: float = 600.0,
    ) -> None:
        if on_refusal not in ("fail", "tell"):
            raise ConfigError(f"OpenEnv: on_refusal is {on_refusal!r}; choose fail or tell.")
        self.session = OpenEnvSession(url, timeout, wait)
        self._reset = {"seed": seed, **(reset or {})}
        self._tells_refusals = on_refusal == "tell"
        self._action = _function(action, "action") or (lambda reply, _: {str(action): reply})
        self._text = _function(observation, "observation") or (lambda shown, _: _text_of(shown, str(observation)))
        self.shown: dict[str, Any] | None = None
        self._is_rewarded = False

    async def observation(self) -> str:
        """Return the text of the newest observation; the first call begins the episode.

        Raises:
            OpenEnvRefusal: the server answered with an error.
            LostToolError: the server cannot be reached, or is gone.
        """
        if self.shown is None:
            self.shown = (await self._send("reset", self._reset)).get("observation") or {}
        return self._text(self.shown, self)

    async def step(self, action: str) -> StepResult:
        """Send the action that a reply stands for.

        Raises:
            WorkflowError: the episode ended, and none of its observations had a reward.
            OpenEnvRefusal, LostToolError: see ``observation``.
        """
        before = await self.observation()
        try:
            payload = self._action(action, self)
        except ValueError as error:
            return StepResult(before, 0.0, False, {"valid": False, "reason": str(error)})
        data = await self._send("step", payload)
        if "refused" in data:
            return StepResult(before, 0.0, False, {"valid": False, "reason": data["refused"]})
        self.shown = data.get("observation") or {}
        reward, done = data.get("reward"), bool(data.get("done"))
        self._is_rewarded |= reward is not None
        if done and not self._is_rewarded:
            raise WorkflowError(
                f"the environment at {self.session.url} ended the episode without a reward: no observation of it had one. An environment "
                "for training sets Observation.reward."
            )
        return StepResult(self._text(self.shown, self), float(reward or 0.0), done, {})

    async def close(self) -> None:
        """End the episode."""
        await self.session.close()

    async def _send(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        # A replay needs no server; a resumed run plays unfinished episodes again, because the server does not keep their state.
        return await durable(f"openenv.{kind}", kind="restart").awaited(self._send_now, kind, dict(data))

    async def _send_now(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self.session.send(kind, data)
        except OpenEnvRefusal as refusal:
            if kind == "step" and self._tells_refusals and refusal.code in _OF_ACTIONS:
                return {"refused": refusal.said}
            raise

    def snapshot(self) -> Any:
        """Raise an error, because the protocol of OpenEnv cannot copy an environment."""
        raise WorkflowError(
            f"the environment at {self.session.url} cannot be copied: the protocol of OpenEnv has no message for it."
        )

    def restore(self, snapshot: Any) -> None:
        """Raise an error; see ``snapshot``."""
        self.snapshot()


def _function(value: Any, name: str) -> Any:
    """Return the function that a setting names; None if it names a field."""
    if isinstance(value, str) and not any(mark in value for mark in ".:"):
        return None
    function = import_path(value, f"OpenEnv: {name}") if isinstance(value, str) else value
    if not callable(function):
        raise ConfigError(f"OpenEnv: {name} is {value!r}; give the name of a field, a function, or its import path.")
    return function


def _text_of(observation: Mapping[str, Any], name: str) -> str:
    """Return the field of that name as text; without a name, the only text, or all fields as JSON."""
    fields = {key: value for key, value in observation.items() if key != "metadata"}
    if name and name not in fields:
        raise ConfigError(
            f"OpenEnv: the observation has no field {name!r}; it has {', '.join(fields) or 'none'}: change observation."
        )
    texts = [value for value in fields.values() if isinstance(value, str)]
    value = fields[name] if name else texts[0] if len(texts) == 1 else fields
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# -- the connection ------------------------------------------------------------------------------------------------------


class OpenEnvRefusal(WorkflowError):
    """The server answered a message with an error.

    Attributes:
        code: the error's code, such as ``VALIDATION_ERROR``.
        said: what the server said.
    """

    def __init__(self, message: str, code: str = "", said: str = "") -> None:
        super().__init__(message)
        self.code, self.said = code, said


def _refusal(url: str, kind: str, data: Mapping[str, Any]) -> OpenEnvRefusal:
    code = str(data.get("code", "an error"))
    details = [
        f"{'.'.join(map(str, each.get('loc', ()))) or 'the action'}: {each.get('msg', each)}"
        for each in data.get("errors") or ()
    ]
    said = f"{data.get('message', '')}{' (' + '; '.join(details) + ')' if details else ''}"
    return OpenEnvRefusal(f"the OpenEnv server at {url} answered {kind!r} with {code}: {said}", code, said)


class OpenEnvSession:
    """A session of an OpenEnv server, which is one instance of its environment. It connects with the first message.

    ::

        async with OpenEnvSession("http://localhost:8000") as session:
            await session.send("reset", {"seed": 1})               # {"observation": {…}, "reward": None, "done": False}
            await session.send("step", {"message": "hello"})

    Messages have no ids, so they are sent one at a time.

    Args:
        url: address of the server (``http(s)://`` or ``ws(s)://``), with the path of the environment if it has one.
        timeout: time limit of a message and its answer, in seconds.
        wait: how long the first message waits for a free session, in seconds.

    Raises:
        ConfigError: ``url`` is no address.
    """

    def __init__(self, url: str, timeout: float = 60.0, wait: float = 600.0) -> None:
        self.url = websocket_url(url)
        self.timeout, self.wait = timeout, wait
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def __aenter__(self) -> OpenEnvSession:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def send(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a message (``reset``, ``step`` or ``state``), and return the data of its answer.

        Raises:
            OpenEnvRefusal: the server answered with an error.
            LostToolError: the server cannot be reached, has ended the connection, or did not answer in time.
        """
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        if self._socket is not None:
            return await self._exchange(message)
        waited = 0.0
        while True:
            try:
                return await self._exchange(message)
            except OpenEnvRefusal as refusal:
                await self.close()
                if refusal.code != _CAPACITY_REACHED:
                    raise
                if waited >= self.wait:
                    raise LostToolError(
                        f"{str(refusal).rstrip('.')}. None became free within {self.wait:g} s: raise max_concurrent_envs of the server, or lower "
                        "rollout.max_concurrent_rollouts."
                    ) from refusal
            pause = min(1.0, 0.05 + waited / 4)
            with UNCOUNTED.get().passing():
                await asyncio.sleep(pause)
            waited += pause

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        kind = message["type"]
        try:
            async with asyncio.timeout(self.timeout):
                socket = await self._connected()
                with contextlib.suppress(ConnectionError):  # a server that is full says so, and ends the connection
                    await socket.send_str(json.dumps(message))
                received = await socket.receive()
        except TimeoutError:
            await self.close()  # an answer that comes later would be taken for that of the next message
            raise LostToolError(
                f"the OpenEnv server at {self.url} did not answer {kind!r} within {self.timeout:g} s; raise timeout if it needs longer."
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            await self.close()
            raise LostToolError(f"the OpenEnv server at {self.url} cannot be reached: {error}") from error
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise LostToolError(
                f"the OpenEnv server at {self.url} ended the connection instead of answering {kind!r} (code {socket.close_code}); its log "
                "says more."
            )
        try:
            answer = json.loads(received.data)
            is_error, content = answer["type"] == "error", dict(answer.get("data") or {})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LostToolError(
                f"{self.url} answered {kind!r} with {received.data[:200]!r}, which is no message of OpenEnv."
            ) from None
        if is_error:
            raise _refusal(self.url, kind, content)
        return content

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        if self._socket is None:
            self._http = self._http or aiohttp.ClientSession()
            self._socket = await self._http.ws_connect(self.url, max_msg_size=_MESSAGE_BYTES)
        return self._socket

    async def close(self) -> None:
        """End the session, and with it the environment. Idempotent."""
        socket, http = self._socket, self._http
        self._socket = self._http = None
        try:
            if socket is not None and not socket.closed:
                with contextlib.suppress(
                    aiohttp.ClientError, OSError, TimeoutError
                ):  # the server is gone, and the environment with it
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        await socket.send_str('{"type": "close"}')
                        await socket.close()
        finally:
            if http is not None:
                await http.close()


def websocket_url(url: str) -> str:
    """Return the address of a server's ``/ws``.

    Raises:
        ConfigError: ``url`` is no address.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme not in ("ws", "wss") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of an OpenEnv server: give one such as http://localhost:8000.")
    path = parts.path.rstrip("/")
    return urlunsplit((scheme, parts.netloc, path if path.endswith("/ws") else f"{path}/ws", parts.query, ""))
