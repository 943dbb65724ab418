"""``response_format`` and its like in other dialects: the schema that is asked for, and the grammar that makes a reply follow it."""

from __future__ import annotations

import json
from typing import Any

from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.text_stream import ReasoningSplit
from rollwright.inference.server.tool_calls import ToolConvention

#: Any text, in a Lark grammar of llguidance.
_TEXT = r"/(.|\n)*/"


def response_schema(given: dict[str, Any]) -> str | None:
    """The JSON Schema that a ``response_format`` (or the Responses protocol's ``text.format``) asks for; None: free text."""
    kind = given.get("type")
    if kind == "text":
        return None
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        schema = (given.get("json_schema") or given).get("schema")
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        raise RequestError(
            f"response_format={given!r:.200} cannot be honoured: it has to be {{'type': 'text'}}, {{'type': 'json_object'}} or "
            "{'type': 'json_schema', 'json_schema': {'name': …, 'schema': {…}}}.",
            param="response_format",
        )
    return json.dumps(schema)


def reply_grammar(schema: str, tokenizer: Any, *, convention: ToolConvention | None, begins_reasoning: bool) -> dict[str, str]:
    """The generation argument that makes a reply follow a schema.

    Args:
        schema: JSON Schema, as text.
        tokenizer: the model's.
        convention: of tool calls, one of which stays possible in place of the answer; None: no tools are offered.
        begins_reasoning: the prompt has opened the model's reasoning: the answer comes behind its end.

    Raises:
        RequestError: a tool call begins like any JSON.
    """
    if convention is None and not begins_reasoning:
        return {"json_schema": schema}
    start, rules = "answer", [f"answer: %json {schema}"]
    if convention is not None:
        if "{" in convention.marks:
            said = "response_format cannot be honoured beside tools: a call of this model's template begins like any JSON."
            raise RequestError(said, param="response_format")
        marks = " | ".join(_mark(mark, tokenizer) for mark in convention.marks)
        start, rules = "(answer | call)", [*rules, f"call: ({marks}) {_TEXT}"]
    if begins_reasoning:
        closing = _mark(ReasoningSplit.CLOSING, tokenizer)
        start = rf"thought /\s{{0,4}}/ {start}"
        is_text = closing.startswith('"')
        rules.append(f"thought[suffix={closing}]: {_TEXT}" if is_text else f"thought: {_TEXT} {closing}")
    return {"grammar": "\n".join([f"start: {start}", *rules, ""])}


def _mark(text: str, tokenizer: Any) -> str:
    """A text in a Lark grammar of llguidance, where special tokens have no text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return f"<[{ids[0]}]>" if len(ids) == 1 and ids[0] in tokenizer.all_special_ids else json.dumps(text)
