"""Side conversations: calls that an agent program makes beside its main conversation, for a title, its memory or a sub-agent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollwright.errors import ConfigError

#: Key of a side conversation's name in the metadata of its calls, if they are not trained.
SIDE_CONVERSATION = "side_conversation"
#: The same if they are trained, also in ``Experience.info``.
SUB_AGENT = "sub_agent"
#: Prefix of an answer's id -> path of its request.
ROUTE_OF_PREFIX = {
    "chatcmpl-": "/v1/chat/completions",
    "cmpl-": "/v1/completions",
    "resp_": "/v1/responses",
    "msg_": "/v1/messages",
    "gen-": "/inference/v1/generate",
}


@dataclass(frozen=True)
class SideConversation:
    """Recognises side conversations. The policy answers them, but only those of sub-agents (``trained``) are trained.

    At least one condition has to be given. All given conditions have to hold. The first rule that holds counts.

    Attributes:
        name: what the conversation is for, such as "title"; shown in the viewer.
        system: regular expression that is searched for in the system prompt.
        model: name of the model in the request. The front accepts it as a name of the policy.
        route: path of the request, such as ``/v1/responses``.
        header: name of an HTTP header that the request has.
        trained: train the conversation: its rows have the name in ``Experience.info["sub_agent"]``.
    """

    name: str
    system: str = ""
    model: str = ""
    route: str = ""
    header: str = ""
    trained: bool = False

    def __post_init__(self) -> None:
        if not self.name or not (self.system or self.model or self.route or self.header):
            raise ConfigError(
                f"side conversation {self.name!r}: give it a name, and at least one of system, model, route and header."
            )
        if not isinstance(self.trained, bool):
            raise ConfigError(f"side conversation {self.name!r}: trained={self.trained!r} has to be true or false.")
        if self.route and self.route not in ROUTE_OF_PREFIX.values():
            raise ConfigError(
                f"side conversation {self.name!r}: the front has no route {self.route!r}; it has {', '.join(ROUTE_OF_PREFIX.values())}."
            )
        try:
            re.compile(self.system)
        except re.error as error:
            raise ConfigError(
                f"side conversation {self.name!r}: system={self.system!r} is no regular expression: {error}."
            ) from error

    @property
    def key(self) -> str:
        """Key of the name in the metadata of calls: ``SUB_AGENT`` or ``SIDE_CONVERSATION``."""
        return SUB_AGENT if self.trained else SIDE_CONVERSATION

    def matches(
        self, messages: Iterable[Mapping[str, Any]], model: str, route: str, headers: Mapping[str, str] | None = None
    ) -> bool:
        """Return whether a request belongs to such a conversation.

        Args:
            messages: messages of the request; content is text.
            model: the model that the request names.
            route: path of the request.
            headers: HTTP headers of the request; names in lower case.
        """
        if (self.model and self.model != model) or (self.route and self.route != route):
            return False
        if self.header and self.header.lower() not in (headers or {}):
            return False
        systems = [message["content"] for message in messages if message["role"] == "system"]
        return not self.system or any(re.search(self.system, text) for text in systems)


def side_conversations(rules: Iterable[SideConversation | Mapping[str, Any]]) -> tuple[SideConversation, ...]:
    """Make rules from mappings of their fields, as a config gives them.

    Raises:
        ConfigError: a rule is no mapping, or has an unknown field.
    """
    known = [field.name for field in fields(SideConversation)]
    made = []
    for rule in rules:
        if isinstance(rule, SideConversation):
            made.append(rule)
        elif isinstance(rule, Mapping) and set(rule) <= set(known):
            made.append(SideConversation(**{"name": "", **rule}))
        else:
            raise ConfigError(f"side conversation {rule!r}: give a mapping of {', '.join(known)}.")
    return tuple(made)
