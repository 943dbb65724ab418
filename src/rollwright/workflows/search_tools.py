"""The actions of a search agent: how they are read from its text, carried out, and shown to it.

An action is a closed tag in what the model wrote: ``<search>query</search>``, ``<access>url</access>`` or
``<answer>text</answer>``. Whatever goes wrong with a tool becomes text that the model reads; it never ends the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollwright.environments.retrieval import SearchTool, ToolError
from rollwright.errors import DataError
from rollwright.tracking import logging
from rollwright.workflows.prompting import fill

logger = logging.getLogger("search_agent")

PROMPT_TEMPLATE = """You are a research assistant with a search engine. Work in steps. In each step, first reason between <think> and \
</think>. Then do one of the following.
- To look something up, write <search> your query </search>. What is found is shown to you between <information> and </information>.
- When you know the answer, write <answer> the answer </answer>, as short as possible. Several answers are separated by commas.

Question: {question}

<think>"""

PROMPT_TEMPLATE_WITH_ACCESS = PROMPT_TEMPLATE.replace(
    "- When you know",
    "- To read a page whose address you have seen, write <access> its url </access>. Its text is shown to you in the same way.\n"
    "- When you know",
)
DOCUMENT_TEMPLATE = '<document title="{title}">\n{contents}\n</document>'
INFORMATION_TEMPLATE = "\n\n<information>\n{documents}\n</information>\n\n"

_ACTION = re.compile(r"<(search|access|answer)>(.*?)</\1>", re.DOTALL)
_CLOSING = re.compile(r"</(search|access|answer)>")


@dataclass(frozen=True)
class Action:
    """What the model asked for: ``kind`` is search, access or answer; ``argument`` is the stripped text in its tag."""

    kind: str
    argument: str


@dataclass
class ToolResult:
    """Text for the model, and whether the call failed."""

    text: str
    failed: bool = False


def parse_action(text: str, kinds: tuple[str, ...] = ("search", "access", "answer")) -> Action | None:
    """The last closed action in a turn's text.

    A closing tag that nothing opened is an action with an empty argument, so that the model can be told.
    """
    found = [Action(match[1], match[2].strip()) for match in _ACTION.finditer(text) if match[1] in kinds]
    if found:
        return found[-1]
    stray = [match[1] for match in _CLOSING.finditer(text) if match[1] in kinds]
    return Action(stray[-1], "") if stray else None


def parse_search_query(text: str) -> str | None:
    """The last search query in a text, or None."""
    action = parse_action(text, ("search",))
    return action.argument or None if action else None


def parse_answer(text: str) -> str | None:
    """The last answer in a text, or None."""
    action = parse_action(text, ("answer",))
    return action.argument or None if action else None


async def run_tool(
    tool: SearchTool, action: Action, *, topk: int, timeout: float, document_template: str = DOCUMENT_TEMPLATE
) -> ToolResult:
    """Carry out a search or an access.

    Args:
        tool: what is called; its methods may also be plain.
        action: a ``search`` or an ``access``.
        topk: documents of a search.
        timeout: seconds that the call may take.
        document_template: how a document is shown; ``{title}``, ``{contents}`` and ``{url}`` are filled.

    Returns:
        Text for the model: documents, or what went wrong.
    """
    if not action.argument:
        return ToolResult(f"The {action.kind} was empty. Write <{action.kind}> text </{action.kind}>.", failed=True)
    try:
        async with asyncio.timeout(timeout):
            if action.kind == "search":
                documents = await _call(tool.search, action.argument, topk)
            else:
                page = await _call(tool.access, action.argument)
                documents = [] if page is None else [{"title": action.argument, **page}]
        shown = [show_document(document, document_template) for document in documents]
    except TimeoutError:
        logger.warning("%s %r took over %g s and was given up", action.kind, action.argument[:80], timeout)
        return ToolResult(f"The {action.kind} took longer than {timeout:g} seconds and was given up.", failed=True)
    except ToolError as error:
        return ToolResult(f"The {action.kind} failed: {error}", failed=True)
    except Exception as error:
        logger.warning("%s %r failed: %s: %s", action.kind, action.argument[:80], type(error).__name__, error)
        return ToolResult(f"The {action.kind} failed: {type(error).__name__}: {str(error)[:200]}", failed=True)
    if not shown:
        return ToolResult("Nothing was found." if action.kind == "search" else "There is no page at this address.")
    return ToolResult("\n\n".join(shown))


async def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a tool's method; a plain one in a thread, so that it does not hold up the event loop."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    result = await asyncio.to_thread(function, *arguments)
    return await result if inspect.isawaitable(result) else result


def show_document(document: Mapping[str, Any], template: str = DOCUMENT_TEMPLATE) -> str:
    """A document as the model sees it.

    Raises:
        DataError: it has no ``contents``: an empty text would look like a page that says nothing.
    """
    if not isinstance(document, Mapping) or "contents" not in document:
        what = (
            f"it has {', '.join(map(str, document))}" if isinstance(document, Mapping) else f"it is {type(document).__name__}"
        )
        raise DataError(f"a document has no 'contents' ({what}).")
    title = document.get("wikipedia_title") or document.get("title") or ""
    return fill(template, title=title, contents=document.get("contents") or "", url=document.get("url") or "")
