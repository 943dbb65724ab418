"""Structured output: convert ``response_format``, its equivalents in other dialects and vLLM's ``structured_outputs`` to grammars."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NamedTuple

from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.text_stream import ReasoningSplit
from rollwright.inference.server.tool_calls import ToolConvention

#: Any text, in a Lark grammar of llguidance.
_TEXT = r"/(.|\n)*/"
#: Special characters of regular expressions.
_MARKS = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


class Structure(NamedTuple):
    """The structure that a reply has to follow.

    Attributes:
        kind: the generation argument that enforces the structure.
        text: JSON Schema, a regular expression or a Lark grammar.
        param: the request's parameter that asks for the structure.
    """

    kind: Literal["json_schema", "regex", "grammar"]
    text: str
    param: str


def format_structure(given: dict[str, Any]) -> Structure | None:
    """Return the structure that ``response_format`` (``text.format`` in the Responses API) requests, or None for free text."""
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
    return Structure("json_schema", json.dumps(schema), "response_format")


def outputs_structure(given: dict[str, Any]) -> Structure | None:
    """Return the structure that vLLM's ``structured_outputs`` request, or None if they request none."""
    param = "structured_outputs"
    wanted = {name: value for name, value in given.items() if value not in (None, False, "")}
    wanted.pop("disable_fallback", None)  # this server has no fallback
    match wanted:
        case {"json": dict() | str() as schema, **rest} if not rest:
            return Structure("json_schema", schema if isinstance(schema, str) else json.dumps(schema), param)
        case {"json_object": True, **rest} if not rest:
            return Structure("json_schema", '{"type": "object"}', param)
        case {"regex": str(text), **rest} if not rest:
            return Structure("regex", text, param)
        case {"choice": [_, *_] as choices, **rest} if not rest and all(isinstance(text, str) for text in choices):
            return Structure("regex", "|".join(f"({_escaped(text)})" for text in choices), param)
        case {"grammar": str(text), **rest} if not rest:
            return Structure("grammar", _lark(text), param)
    if not wanted:
        return None
    raise RequestError(
        f"{param}={given!r:.200} cannot be honoured: it has to hold one of json (a JSON Schema), regex, choice (a list of texts), "
        "grammar (Lark or EBNF) and json_object, and nothing else.",
        param=param,
    )


def _escaped(text: str) -> str:
    return _MARKS.sub(lambda match: "\\" + match[0], text)


def _lark(text: str) -> str:
    """Convert a grammar to Lark, if it is in the EBNF of llama.cpp and xgrammar."""
    if "::=" not in text:
        return text
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        return gbnf_to_lark(text)
    except ModuleNotFoundError:
        said = "structured_outputs.grammar in EBNF needs llguidance: pip install 'rollwright[grammar]', or write it in Lark."
    except Exception as error:  # a third-party parser may raise anything
        said = f"structured_outputs.grammar cannot be parsed as EBNF: {error}."
    raise RequestError(said, param="structured_outputs")


def reply_grammar(
    structure: Structure, tokenizer: Any, *, convention: ToolConvention | None, begins_reasoning: bool
) -> dict[str, str]:
    """Return the generation argument that makes a reply follow a structure.

    Args:
        structure: the structure of the answer.
        tokenizer: the model's tokenizer.
        convention: format of the tool calls that the reply may consist of instead. None if no tools are offered.
        begins_reasoning: True if the prompt opens the model's reasoning; the answer then follows the reasoning.

    Raises:
        RequestError: tool calls cannot be distinguished from other JSON, or the grammar cannot be nested in another.
    """
    if convention is None and not begins_reasoning:
        return {structure.kind: structure.text}
    if structure.kind == "grammar":
        beside = "with tools" if convention is not None else "after the reasoning that this model's template opens"
        raise RequestError(f"{structure.param}.grammar cannot be honoured {beside}; use json.", param=structure.param)
    answer = f"%json {structure.text}" if structure.kind == "json_schema" else f"/{_slashes_escaped(structure.text)}/"
    start, rules = "answer", [f"answer: {answer}"]
    if convention is not None:
        if "{" in convention.marks:
            raise RequestError(
                f"{structure.param} cannot be honoured with tools: calls in this model's template look like any other JSON.",
                param=structure.param,
            )
        marks = " | ".join(_mark(mark, tokenizer) for mark in convention.marks)
        start, rules = "(answer | call)", [*rules, f"call: ({marks}) {_TEXT}"]
    if begins_reasoning:
        closing = _mark(ReasoningSplit.CLOSING, tokenizer)
        start = rf"thought /\s{{0,4}}/ {start}"
        is_text = closing.startswith('"')
        rules.append(f"thought[suffix={closing}]: {_TEXT}" if is_text else f"thought: {_TEXT} {closing}")
    return {"grammar": "\n".join([f"start: {start}", *rules, ""])}


def _slashes_escaped(regex: str) -> str:
    return re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL)


def _mark(text: str, tokenizer: Any) -> str:
    """Write a string for a Lark grammar of llguidance, in which special tokens are written as ids."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return f"<[{ids[0]}]>" if len(ids) == 1 and ids[0] in tokenizer.all_special_ids else json.dumps(text)
