"""Side conversations: calls that an agent program makes beside its task, such as for a title or a summary of its memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollwright.errors import ConfigError

#: Key of a side conversation's name in the metadata of its calls.
SIDE_CONVERSATION = "side_conversation"
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
    """Recognises side conversations. The policy answers them, but they are not trained.

    At least one condition has to be given. All given conditions have to hold.

    Attributes:
        name: what the conversation is for, such as "title"; shown in the viewer.
        system: regular expression that is searched for in the system prompt.
        model: name of the model in the request. The front accepts it as a name of the policy.
        route: path of the request, such as ``/v1/responses``.
    """

    name: str
    system: str = ""
    model: str = ""
    route: str = ""

    def __post_init__(self) -> None:
        if not self.name or not (self.system or self.model or self.route):
            raise ConfigError(f"side conversation {self.name!r}: give it a name, and at least one of system, model and route.")
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

    def matches(self, messages: Iterable[Mapping[str, Any]], model: str, route: str) -> bool:
        """Return whether a request belongs to such a conversation.

        Args:
            messages: messages of the request; content is text.
            model: the model that the request names.
            route: path of the request.
        """
        if (self.model and self.model != model) or (self.route and self.route != route):
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
