"""An agent that thinks, searches, reads and answers, over as many turns as it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.environments.retrieval import DEFAULT_TOPK
from rollwright.environments.search_tool import make_search_tool
from rollwright.errors import ConfigError, WorkflowError
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.engine import InferenceEngine
from rollwright.rewards.text import f1_score, references
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.tracking import logging
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.base import RolloutWorkflow
from rollwright.workflows.dumping import dump_sequence
from rollwright.workflows.prompting import as_gconfig, as_tokenizer, stopping_at
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.search_tools import (
    DOCUMENT_TEMPLATE,
    INFORMATION_TEMPLATE,
    PROMPT_TEMPLATE,
    PROMPT_TEMPLATE_WITH_ACCESS,
    fill,
    parse_action,
    run_tool,
)
from rollwright.workflows.side_by_side import one_group
from rollwright.workflows.token_sequence import TokenSequence
from rollwright.workflows.turns import Turns

logger = logging.getLogger("search_agent")


@WORKFLOWS.register_module("search_agent")
class SearchAgentWorkflow(RolloutWorkflow):
    """Think, search, read, answer: one row for one episode.

    A turn ends at ``</search>``, ``</access>`` or ``</answer>``. What a tool returned is put between ``<information>`` tags and
    is not trained on. The episode ends with an answer, an end token, ``max_turns`` turns or ``max_tokens`` tokens.

    Args:
        gconfig: generation arguments of one turn; the stop strings of the actions are added to its own.
        tokenizer: tokenizer of the policy.
        max_tokens: tokens of prompt, turns and tool text together. Long tool text loses its end, so that the next turn has room.
        max_turns: turns at most.
        verbose: log turns and length of each episode.
        search_tool: ``host:port`` of a retrieval service, ``{corpus: FILE}``, ``{encyclopedia: {...}}`` or an object with
            ``search(query, topk)`` and, for ``enable_access``, ``access(url)``, async or plain (plain ones run in a thread);
            None: no tool is there and every call says so.
        prompt_template: text before the first turn, with ``{question}``; None: the template of ``search_tools``.
        document_template, information_template: how tool results are shown, with ``{title}``, ``{contents}``, ``{url}`` and
            ``{documents}``.
        topk: documents of a search.
        tool_timeout: seconds that one tool call may take.
        enable_access: offer ``<access> url </access>``.
        reward_fn: called with the prompt, everything after it, their token ids and the row; None: the best F1 of the answer
            with one of ``data["answer"]``, 0 without an answer.
        rollout_stat_scope: scope of the metrics.
        dump_dir: where each episode is written to, readable; None: nowhere.
        reward_timeout: seconds that ``reward_fn`` may take.

    A row needs ``question`` and, for the default reward, ``answer``: a text or number, or a list of accepted ones. ``gconfig.n_samples`` is
    not looked at: groups are made by the executor, or by ``GroupedSearchAgentWorkflow``.
    """

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
        for name, template, places in (
            ("prompt_template", prompt_template, ["{question}"]),
            ("information_template", information_template, ["{documents}"]),
        ):
            if missing := [place for place in places if place not in template]:
                raise ConfigError(
                    f"{type(self).__name__}: {name} has no {missing[0]}: {template[:80]!r}. Put it where the text goes."
                )
        if max_tokens < 1 or max_turns < 1 or topk < 1 or tool_timeout <= 0:
            raise ConfigError(f"{type(self).__name__}: max_tokens, max_turns, topk and tool_timeout must be above 0.")
        self.tokenizer = as_tokenizer(tokenizer)
        self.kinds = ("search", "access", "answer") if enable_access else ("search", "answer")
        self.gconfig = stopping_at(as_gconfig(gconfig, self.tokenizer), *(f"</{kind}>" for kind in self.kinds))
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
        self.reward = None if reward_fn is None else AsyncRewardWrapper(reward_fn, timeout_seconds=reward_timeout)
        self.tracker = get_tracker(rollout_stat_scope)
        self.dump_dir = dump_dir

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        """See ``RolloutWorkflow``; the trajectory has one row. An aborted episode is rejected."""
        prompt_ids = self._encode(fill(self.prompt_template, question=_question(data)))
        turns = Turns(engine, prompt_ids, self.gconfig, self.tokenizer, max_turns=self.max_turns, max_tokens=self.max_tokens)
        answer, tool_calls, tool_failures = None, 0, 0
        async for response in turns:
            if response.truncated:
                break
            action = parse_action(self.tokenizer.decode(response.output_tokens), self.kinds)
            if action is None:
                break  # an end token without an action
            if action.kind == "answer":
                answer = action.argument
                break
            if turns.is_last:
                break  # nobody would read what is found
            tool_calls += 1
            information, failed = await self._information(action)
            tool_failures += failed
            turns.append_filled(self.information_template, documents=information)
        if turns.is_aborted:
            return None

        reward = await self._reward(turns, answer, data)
        facts = {"turns": turns.count, "tool_calls": tool_calls, "tool_failures": tool_failures, "answered": bool(answer)}
        self.tracker.scalar(**facts, episode_reward=reward)
        if self.verbose:
            logger.info("turns=%d tools=%d length=%d reward=%.3f", turns.count, tool_calls, len(turns), reward)
        if self.dump_dir is not None:
            await dump_sequence(self.dump_dir, turns, self.tokenizer, data, {"reward": reward, **facts})
        return turns.row(reward)

    async def _information(self, action: Any) -> tuple[str, bool]:
        """Tool text before and after its contents, and whether the call failed."""
        if self.tool is None:
            return "No search engine is connected.", True
        result = await run_tool(
            self.tool, action, topk=self.topk, timeout=self.tool_timeout, document_template=self.document_template
        )
        return result.text, result.failed

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def _reward(self, sequence: TokenSequence, answer: str | None, data: dict[str, Any]) -> float:
        if self.reward is not None:
            prompt_ids, completion_ids = sequence.input_ids[: sequence.prompt_length], sequence.completion_ids
            prompt, completion = self.tokenizer.decode(prompt_ids), self.tokenizer.decode(completion_ids)
            return await self.reward(prompt, completion, prompt_ids, completion_ids, **data)
        accepted = data.get("answer")
        if accepted is None:
            raise WorkflowError(
                f"{type(self).__name__}: the task has no 'answer' (it has {', '.join(sorted(data))}); give one, or a reward_fn."
            )
        truths = references(accepted)
        return max(f1_score(answer, truth) for truth in truths) if answer else 0.0


@WORKFLOWS.register_module("grouped_search_agent")
class GroupedSearchAgentWorkflow(SearchAgentWorkflow):
    """A whole GRPO group in one sample: ``group_size`` episodes of the same task side by side, one row each.

    Run it with ``n_samples: 1``: the group is made here. The other arguments are those of ``SearchAgentWorkflow``.
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

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        """See ``RolloutWorkflow``; the trajectory has ``group_size`` rows.

        Where one episode is aborted, the group is rejected; where one raises, the others are ended.
        """
        return await one_group(
            super(GroupedSearchAgentWorkflow, self).arun_episode(engine, data) for _ in range(self.group_size)
        )


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
