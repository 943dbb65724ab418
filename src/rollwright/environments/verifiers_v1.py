"""Environments of ``verifiers.v1`` in their process, and a harness that needs no program. Imported only where verifiers is installed."""

from __future__ import annotations

import contextlib
import itertools
import os
import ssl
import sys
import types
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import verifiers.v1 as vf
import verifiers.v1.clients.eval as relay
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

CHAT = "rollwright-chat"
#: Begins the names of the environment variables that hold the keys of episodes.
KEY = "ROLLWRIGHT_EPISODE_KEY_"
_CERTIFICATES = ssl.create_default_context()  # loaded once: it takes longer than an episode of one call


class ChatHarnessConfig(vf.HarnessConfig):
    """Nothing to set."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """Asks the model in this process, once for each message of the user. It offers no tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Send the conversation; its answer is in the trace."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        is_here = urlsplit(endpoint).hostname in ("localhost", "127.0.0.1", "::1")  # a proxy leads elsewhere
        http = openai.DefaultAsyncHttpxClient(verify=_CERTIFICATES, trust_env=not is_here)
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)  # type: ignore[arg-type]
            except openai.APIStatusError as error:
                if trace.stop_condition is None and "context_length_exceeded" not in str(error):
                    raise
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _plugin() -> types.ModuleType:
    """The module by which verifiers finds the harness."""
    module = types.ModuleType(CHAT.replace("-", "_"))
    module.ChatHarness, module.__all__ = ChatHarness, ["ChatHarness"]  # type: ignore[attr-defined]
    return module


class _FrontConnections(httpx.AsyncClient):
    """Connects to the front, for all episodes. verifiers keeps the client of each key until its process ends, with all that it has opened."""

    def __init__(self) -> None:
        timeout, limits = httpx.Timeout(None, connect=30.0), httpx.Limits(max_keepalive_connections=0)
        super().__init__(verify=_CERTIFICATES, trust_env=False, timeout=timeout, limits=limits)

    async def aclose(self) -> None:
        """Do nothing: the clients of other episodes use it, too."""


def _share_connections() -> None:
    """Let the clients of all episodes use the same connections."""
    shared, build = _FrontConnections(), relay.build_async_httpx
    relay.build_async_httpx = lambda config: shared if config.api_key_var.startswith(KEY) else build(config)


class V1:
    """A taskset, played by one agent.

    Args:
        name: name of the taskset's package.
        args: the environment's configuration: ``taskset``, ``agent``, …
    """

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        sys.modules.setdefault(CHAT.replace("-", "_"), _plugin())
        agent = {"runtime": {"type": "subprocess"}, **args.get("agent", {})}
        if default_harness_id(name) == "bash":  # the taskset has none of its own
            agent.setdefault("harness", {"id": CHAT})
        config = {**args, "taskset": {**args.get("taskset", {}), "id": name}, "agent": agent}
        self._environment = load_environment(resolve_env_config(config))
        self._task_type = type(self._environment.taskset).task_type()
        self._numbers = itertools.count()
        _share_connections()

    def tasks(self, split: str) -> tuple[list[dict[str, Any]], bool]:
        taskset = self._environment.taskset
        if not taskset.bounded:
            raise ValueError("its taskset is infinite; an environment of a finite one is needed")
        return [task.data.model_dump(mode="json", exclude_none=True) for task in taskset], False

    async def run(self, task: dict[str, Any], base_url: str, api_key: str, model: str, seconds: float) -> dict[str, Any]:
        variable = f"{KEY}{next(self._numbers)}"
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
        context = vf.ModelContext(client=client, model=model, sampling=vf.SamplingConfig())
        data = self._task_type.data_type().model_validate(task)
        (slot,) = self._environment.slots(self._task_type(data, self._environment.config.taskset.task))
        os.environ[variable] = api_key
        try:
            episode = await self._environment.run_slot(slot, context)
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            said = "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok, and has no error"
            return {"failure": "reward" if " scoring: " in said else "environment", "said": said}
        if len(episode.traces) != 1:
            names = ", ".join(trace.agent.name for trace in episode.traces)
            return {
                "failure": "environment",
                "said": f"it ran {len(episode.traces)} agents ({names}), and a sample is the run of one",
            }
        (trace,) = episode.traces
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            return {"failure": "reward", "said": f"it gave no reward {', '.join(missing)}"}
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return {"reward": trace.reward, "metrics": {**trace.metrics, **scores}}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self._environment.serving():
            yield
