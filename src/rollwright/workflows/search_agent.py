"""An agent that thinks, searches, reads and answers, over as many turns as it needs.

An action is a closed tag in the model's text: ``<search>query</search>``, ``<access>url</access>`` or ``<answer>text</answer>``. If a tool
fails, the model reads the reason; the episode continues.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.environments.retrieval import DEFAULT_TOPK, ToolError, make_search_tool
from rollwright.errors import ConfigError, DataError, WorkflowError
from rollwright.experience.durable import durable
from rollwright.inference.engine import InferenceEngine
from rollwright.rewards.text import f1_score, references
from rollwright.tracking import logging
from rollwright.workflows.episode import EpisodeWorkflow
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.turns import Turns, fill

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


@WORKFLOWS.register_module("search_agent")
class SearchAgentWorkflow(EpisodeWorkflow):
    """Lets the model think, search, read and answer; one row for each episode.

    A turn ends at ``</search>``, ``</access>`` or ``</answer>``. Tool results are put between ``<information>`` tags and are not
    trained on. The episode ends with an answer, an end token, ``max_turns`` turns or ``max_tokens`` tokens.

    Args:
        gconfig: generation arguments of one turn; the stop strings of the actions are added to its own.
        max_tokens: maximum number of tokens of prompt, turns and tool text together. Long tool text is cut at its end, to leave room for
            the next turn.
        max_turns: maximum number of turns.
        verbose: log turns and length of each episode.
        search_tool: ``host:port`` of a retrieval service, ``{corpus: FILE}``, ``{encyclopedia: {...}}`` or an object with
            ``search(query, topk)`` and, for ``enable_access``, ``access(url)``, async or plain (plain ones run in a thread).
            If None, every tool call reports that no tool is connected.
        prompt_template: template of the text before the first turn; placeholder ``{question}``. Default: ``PROMPT_TEMPLATE``.
        document_template: template of a document; placeholders ``{title}``, ``{contents}`` and ``{url}``.
        information_template: template of tool results; placeholder ``{documents}``.
        topk: number of documents that a search returns.
        tool_timeout: time limit of a tool call in seconds.
        enable_access: offer ``<access> url </access>``.
        reward_fn: called with the prompt, everything after it, their token ids and the row. If None, the reward is the highest
            F1 between the answer and any of ``data["answer"]``, or 0 without an answer.

    The other arguments are those of :class:`EpisodeWorkflow`. A row needs ``question`` and, for the default reward, ``answer``: a string or
    number, or a list of accepted answers. ``gconfig.n_samples`` is ignored: groups are made by the executor, or by
    ``GroupedSearchAgentWorkflow``.
    """

    group_size = 1

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_tokens: int = 4096,
        max_turns: int = 32,
        verbose: bool = False,
        *,
        search_tool: Any = "localhost:5001",
        prompt_template: str | None = None,
        document_template: str = DOCUMENT_TEMPLATE,
        information_template: str = INFORMATION_TEMPLATE,
        topk: int = DEFAULT_TOPK,
        tool_timeout: float = 30.0,
        enable_access: bool = False,
        reward_fn: Callable[..., Any] | str | None = None,
        rollout_stat_scope: str = "rollout",
        dump_dir: str | None = None,
        reward_timeout: float = 15.0,
    ) -> None:
        if prompt_template is None:
            prompt_template = PROMPT_TEMPLATE_WITH_ACCESS if enable_access else PROMPT_TEMPLATE
        templates = {
            "prompt_template": (prompt_template, "{question}"),
            "information_template": (information_template, "{documents}"),
        }
        for name, (template, place) in templates.items():
            if place not in template:
                raise ConfigError(
                    f"{type(self).__name__}: {name} has no {place}: {template[:80]!r}. Put it where the text goes."
                )
        if max_tokens < 1 or max_turns < 1 or topk < 1 or tool_timeout <= 0:
            raise ConfigError(f"{type(self).__name__}: max_tokens, max_turns, topk and tool_timeout must be above 0.")
        super().__init__(
            reward_fn,
            gconfig,
            tokenizer,
            rollout_stat_scope=rollout_stat_scope,
            dump_dir=dump_dir,
            reward_timeout=reward_timeout,
        )
        self.kinds = ("search", "access", "answer") if enable_access else ("search", "answer")
        self.stop_at(*(f"</{kind}>" for kind in self.kinds))
        self.max_tokens = max_tokens
        self.max_turns = max_turns
        self.verbose = verbose
        self.tool = None if search_tool is None else make_search_tool(search_tool)
        if enable_access and self.tool is not None and not hasattr(self.tool, "access"):
            raise ConfigError(
                f"{type(self).__name__}: enable_access offers <access>, but {type(self.tool).__name__} has no access(url): "
                "give it one, or leave enable_access out."
            )
        self.prompt_template = prompt_template
        self.document_template = document_template
        self.information_template = information_template
        self.topk = topk
        self.tool_timeout = tool_timeout

    async def episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run one episode of thinking, searching, reading and answering; return one row."""
        prompt_ids = self.encode(fill(self.prompt_template, question=_question(data)))
        turns = Turns(engine, prompt_ids, self.gconfig, self.tokenizer, max_turns=self.max_turns, max_tokens=self.max_tokens)
        answer, tool_calls, tool_failures = None, 0, 0
        async for response in turns:
            action = None if response.truncated else parse_action(self.tokenizer.decode(response.output_tokens), self.kinds)
            kind, argument = action or ("", "")
            if kind == "answer":
                answer = argument
            if kind in ("", "answer") or turns.is_last:  # nobody would read the result after the last turn
                break
            tool_calls += 1
            information, failed = await durable("search tool").awaited(self._look_up, kind, argument)
            tool_failures += failed
            turns.append_filled(self.information_template, documents=information)
        if turns.is_aborted:
            return None
        if self.async_reward_fn is None:
            reward = self._f1(answer, data)
        else:
            reward = await self.score(prompt_ids, turns.completion_ids, data, skip_special_tokens=False)
        if self.verbose:
            logger.info("turns=%d tools=%d length=%d reward=%.3f", turns.count, tool_calls, len(turns), reward)
        figures = {"turns": turns.count, "tool_calls": tool_calls, "tool_failures": tool_failures, "answered": bool(answer)}
        return await self.end(turns, data, reward, **figures)

    def _f1(self, answer: str | None, data: dict[str, Any]) -> float:
        accepted = data.get("answer")
        if accepted is None:
            raise WorkflowError(
                f"{type(self).__name__}: the task has no 'answer' (it has {', '.join(sorted(data))}); give one, or a reward_fn."
            )
        return max(f1_score(answer, truth) for truth in references(accepted)) if answer else 0.0

    async def _look_up(self, kind: str, argument: str) -> tuple[str, bool]:
        """Run a search or an access. Returns the text that the model reads, and whether the call failed."""
        if self.tool is None:
            return "No search engine is connected.", True
        if not argument:
            return f"The {kind} was empty. Write <{kind}> text </{kind}>.", True
        try:
            async with asyncio.timeout(self.tool_timeout):
                if kind == "search":
                    documents = await _call(self.tool.search, argument, self.topk)
                else:
                    page = await _call(self.tool.access, argument)
                    documents = [] if page is None else [{"title": argument, **page}]
            shown = [show_document(document, self.document_template) for document in documents]
        except TimeoutError:
            logger.warning("%s %r took over %g s and was given up", kind, argument[:80], self.tool_timeout)
            return f"The {kind} took longer than {self.tool_timeout:g} seconds and was given up.", True
        except ToolError as error:
            return f"The {kind} failed: {error}", True
        except Exception as error:
            logger.warning("%s %r failed: %s: %s", kind, argument[:80], type(error).__name__, error)
            return f"The {kind} failed: {type(error).__name__}: {str(error)[:200]}", True
        nothing = "Nothing was found." if kind == "search" else "There is no page at this address."
        return "\n\n".join(shown) if shown else nothing, False


@WORKFLOWS.register_module("grouped_search_agent")
class GroupedSearchAgentWorkflow(SearchAgentWorkflow):
    """Runs a whole GRPO group as one sample: ``group_size`` concurrent episodes of the same task, one row each.

    Use it with ``n_samples: 1``, because the workflow makes the group itself. The other arguments are those of ``SearchAgentWorkflow``.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_tokens: int = 4096,
        max_turns: int = 32,
        group_size: int = 4,
        verbose: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(gconfig, tokenizer, max_tokens, max_turns, verbose, **options)
        if group_size < 1:
            raise ConfigError(f"GroupedSearchAgentWorkflow: group_size is {group_size}; it is at least 1.")
        self.group_size = group_size


def _question(data: dict[str, Any]) -> str:
    if isinstance(data.get("question"), str):
        return data["question"]
    messages = data.get("messages")
    if messages and isinstance(messages[-1]["content"], str):
        return messages[-1]["content"]
    raise WorkflowError(
        f"SearchAgentWorkflow: the task has no 'question' that is text, nor 'messages' that end with one (it has "
        f"{', '.join(sorted(data))}); name the column so."
    )


def parse_action(text: str, kinds: tuple[str, ...] = ("search", "access", "answer")) -> tuple[str, str] | None:
    """Return the last closed action in a turn's text (its kind, and the stripped text in its tag), or None if there is no action.

    A closing tag without an opening one is an action with an empty text, so that the model is told about it.
    """
    found = [(match[1], match[2].strip()) for match in _ACTION.finditer(text) if match[1] in kinds]
    if found:
        return found[-1]
    stray = [match[1] for match in _CLOSING.finditer(text) if match[1] in kinds]
    return (stray[-1], "") if stray else None


async def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a tool's method; a plain one runs in a thread, so that it does not block the event loop."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    result = await asyncio.to_thread(function, *arguments)
    return await result if inspect.isawaitable(result) else result


def show_document(document: Mapping[str, Any], template: str = DOCUMENT_TEMPLATE) -> str:
    """Format a document as the model sees it.

    Raises:
        DataError: the document has no ``contents``. An empty text would look like an empty page.
    """
    if not isinstance(document, Mapping) or "contents" not in document:
        what = (
            f"it has {', '.join(map(str, document))}" if isinstance(document, Mapping) else f"it is {type(document).__name__}"
        )
        raise DataError(f"a document has no 'contents' ({what}).")
    title = document.get("wikipedia_title") or document.get("title") or ""
    return fill(template, title=title, contents=document.get("contents") or "", url=document.get("url") or "")
