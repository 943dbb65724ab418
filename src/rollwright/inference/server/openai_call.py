"""One call of the OpenAI protocol: what was asked, and what was answered."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.server.openai_fields import CHAT


@dataclass
class OpenAICall:
    """One call of the OpenAI protocol, with everything that was asked and answered.

    Attributes:
        api_key: the bearer token that the client sent, or None.
        endpoint: ``"chat"`` or ``"completion"``.
        body: the request as it came.
        requests: one for each choice, in the order of the choices.
        responses: what the engine answered to each; complete when ``on_call`` sees the call.
        choices: the choices of the answer, in the protocol's form.
        started: ``time.time()`` at arrival.
    """

    api_key: str | None
    endpoint: str
    body: dict[str, Any]
    requests: list[ModelRequest]
    responses: list[ModelResponse] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    # How the answer is written.
    samples: int = 1
    tools: bool = False
    begun: str = ""  # text that every reply begins with, given and not sampled: of a forced tool call
    logprobs: bool = False
    return_token_ids: bool = False
    keep_stop: bool = False

    @property
    def is_chat(self) -> bool:
        """True for ``/v1/chat/completions``."""
        return self.endpoint == CHAT
