"""Parallel reasoning: a goal with numbered outlines, a path for each outline, written in parallel, and a conclusion from all paths.

The resulting row reads::

    <Goal>
    …<Outline>1. …</Outline>…
    </Goal>
    <Path>
    1. …
    </Path>
    <Conclusion>
    …
    </Conclusion>

The opening tags, the numbers, and the closing tags with their line breaks are markers: log-probability 0.0, version -1, no
loss. The model's text between them is trained as it was sampled.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import ConfigError, PromptTooLongError
from rollwright.inference.engine import InferenceEngine, run_concurrently
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.tracking.rollout_dumps import marked_text
from rollwright.workflows.episode import (
    EpisodeWorkflow,
    InputIdsFunction,
    PromptFunction,
    dump_sample,
    task_name,
)
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.turns import BranchedSequence

BranchAttention = Literal["plain", "isolated"]

#: A number that an outline begins with: ``<Outline>2. …``, ``<Outline> 2: …``, or a line ``2) …`` without tags.
_OUTLINE = re.compile(r"<Outline>\s*(\d+(?:\.\d+)*)\s*[.:)]|^[ \t]*(\d+(?:\.\d+)*)[.:)]\s", re.MULTILINE)


def outline_numbers(goal: str) -> list[str]:
    """Return the distinct numbers of the outlines in a goal, in order of appearance.

    If there are ``<Outline>`` tags, only these count; otherwise, lines that begin with a number do.
    """
    found = list(_OUTLINE.finditer(goal))
    tagged = [match[1] for match in found if match[1]]
    return list(dict.fromkeys(tagged or [match[2] for match in found]))


@dataclass
class PathPart:
    """A goal, path or conclusion: marker, sampled tokens, marker.

    Attributes:
        response: the engine's response; None if the engine had no room for it.
        content: number of sampled tokens before the closing tag.
        is_closed: True if the model wrote the closing tag.
    """

    opening: list[int]
    response: ModelResponse | None
    content: int
    is_closed: bool
    closing: list[int]

    @property
    def is_cut(self) -> bool:
        """True if the part was cut by its own limit or the engine's context."""
        return self.response is None or self.response.truncated

    @property
    def is_aborted(self) -> bool:
        """True if the request was aborted."""
        return self.response is not None and self.response.stop_reason == "abort"

    def append_to(self, row: BranchedSequence, train_closing_tags: bool) -> None:
        """Append the part to a row."""
        row.append_context(self.opening)
        if self.response is not None:
            row.append_response(self.response, trained=None if train_closing_tags else self.content)
        row.append_context(self.closing)


@WORKFLOWS.register_module("parallel_generation")
class ParallelGenerationWorkflow(EpisodeWorkflow):
    """Samples a goal, its paths in parallel, and a conclusion; one row with one reward.

    No request samples more than ``gconfig.max_new_tokens``. If the model does not follow the format:

    * a goal without outlines has one path, numbered 1;
    * a part without its closing tag gets it as a marker. If a limit cut the part, the row counts as truncated;
    * a path that has no room in the engine's context stays empty; a conclusion that has no room is left out.

    Args:
        reward_fn: scores the completion: goal, paths and conclusion, including markers.
        gconfig: how each part is sampled.
        max_goal_tokens: maximum number of tokens of the goal.
        max_path_tokens: maximum number of tokens of each path.
        max_conclusion_tokens: maximum number of tokens of the conclusion.
        branch_attention: ``plain`` trains one causal sequence, in which a path also attends to earlier paths that it was sampled without
            (the change in log-probabilities is reported as ``actor/context_mismatch/…``). ``isolated`` is exact: paths do not see
            each other, and the conclusion sees all of them. It needs the built-in engine.
        max_paths: maximum number of paths; further outlines get none.
        train_closing_tags: also train closing tags that the model wrote, so that it learns to end its parts.

    The other arguments are those of :class:`EpisodeWorkflow`.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool = False,
        max_goal_tokens: int = 2048,
        max_path_tokens: int = 4096,
        max_conclusion_tokens: int = 2048,
        rollout_stat_scope: str = "rollout",
        dump_dir: str | None = None,
        get_input_ids_fn: InputIdsFunction | str | None = None,
        data_extract_prompt_fn: PromptFunction | str | None = None,
        branch_attention: BranchAttention = "plain",
        max_paths: int = 16,
        train_closing_tags: bool = False,
        reward_timeout: float = 15.0,
    ) -> None:
        if branch_attention not in ("plain", "isolated"):
            raise ConfigError(f"branch_attention is {branch_attention!r}: choose 'plain' or 'isolated'.")
        limits = {"max_goal_tokens": max_goal_tokens, "max_path_tokens": max_path_tokens}
        limits |= {"max_conclusion_tokens": max_conclusion_tokens, "max_paths": max_paths}
        if low := [name for name, value in limits.items() if value < 1]:
            raise ConfigError(f"ParallelGenerationWorkflow: {low[0]} is {limits[low[0]]}; it is at least 1.")
        super().__init__(
            reward_fn,
            gconfig,
            tokenizer,
            enable_thinking,
            rollout_stat_scope,
            dump_dir,
            get_input_ids_fn,
            data_extract_prompt_fn,
            reward_timeout,
        )
        self.max_goal_tokens = max_goal_tokens
        self.max_path_tokens = max_path_tokens
        self.max_conclusion_tokens = max_conclusion_tokens
        self.branch_attention = branch_attention
        self.max_paths = max_paths
        self.train_closing_tags = train_closing_tags

    async def episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Sample a goal, its paths and a conclusion; return one row."""
        prompt_ids = list(self.get_input_ids_fn(self.data_extract_prompt_fn(data), self.tokenizer, self.enable_thinking))
        rid = uuid.uuid4().hex
        row = BranchedSequence(prompt_ids, isolated=self.branch_attention == "isolated")
        goal = await self._write(engine, rid, row, "<Goal>\n", "</Goal>", self.max_goal_tokens)
        if goal.response is None:
            raise PromptTooLongError(
                f"The prompt of {len(prompt_ids)} tokens leaves the engine no room for a goal: shorten it or raise context_length."
            )
        if goal.is_aborted:
            return None
        goal.append_to(row, self.train_closing_tags)
        numbers = outline_numbers(self.tokenizer.decode(row.completion_ids, skip_special_tokens=False))
        paths = await run_concurrently(
            self._write(engine, rid, row, f"<Path>\n{number}.", "</Path>", self.max_path_tokens, in_new_branch=True)
            for number in (numbers or ["1"])[: self.max_paths]
        )
        if any(path.is_aborted for path in paths):
            return None
        for path in paths:
            row.open_branch()
            path.append_to(row, self.train_closing_tags)
        row.close_branches()
        conclusion = await self._write(engine, rid, row, "<Conclusion>\n", "</Conclusion>", self.max_conclusion_tokens)
        if conclusion.is_aborted:
            return None
        if conclusion.response is not None:
            conclusion.append_to(row, self.train_closing_tags)
        row.truncated = any(part.is_cut for part in (goal, *paths, conclusion))
        reward = await self.score(prompt_ids, row.completion_ids, data, self.gconfig.skip_special_tokens)
        concluded = conclusion.response.output_tokens[: conclusion.content] if conclusion.response is not None else []
        self.report(
            prompt_tokens=len(prompt_ids),
            goal_tokens=goal.content,
            path_tokens=sum(path.content for path in paths) / len(paths),
            conclusion_tokens=conclusion.content,
            paths=len(paths),
            goal_malformed=not numbers or not goal.is_closed,
            paths_cut=sum(path.is_cut for path in paths) / len(paths),
            conclusion_missing=not self.tokenizer.decode(concluded, skip_special_tokens=True).strip(),
            conclusion_unclosed=not conclusion.is_closed,
            other_context_share=sum(row.other_context) / max(1, sum(row.loss_mask)),
        )
        if self.dump_dir is not None:
            sections = {"prompt": self.tokenizer.decode(prompt_ids, skip_special_tokens=False), "goal": self._marked(goal)}
            sections |= {f"path {number}": self._marked(path) for number, path in enumerate(paths, 1)}
            sections["conclusion"] = self._marked(conclusion) if conclusion.response is not None else "(no room for one)"
            facts = {
                "reward": reward,
                "tokens": f"{row.prompt_length} + {len(row) - row.prompt_length}, {sum(row.loss_mask)} of them trained",
                "branches": self.branch_attention,
            }
            await dump_sample(self.dump_dir, version=row.version, task=task_name(data), sections=sections, facts=facts)
        return row.row(reward)

    async def _write(
        self,
        engine: InferenceEngine,
        rid: str,
        row: BranchedSequence,
        opening: str,
        closing: str,
        limit: int,
        in_new_branch: bool = False,
    ) -> PathPart:
        """Sample one part that follows ``row`` and the opening tag, without changing the row."""
        opening_ids = self.encode(opening)
        gconfig = self.gconfig.new(
            n_samples=1,
            max_new_tokens=min(limit, self.gconfig.max_new_tokens),
            stop=[*(self.gconfig.stop or []), closing],
        )
        request = ModelRequest(
            rid=rid,
            input_ids=row.input_ids + opening_ids,
            gconfig=gconfig,
            tokenizer=self.tokenizer,
            **row.layout_before(opening_ids, in_new_branch=in_new_branch),  # type: ignore[arg-type]
        )
        try:
            response = await engine.agenerate(request)
        except PromptTooLongError:
            return PathPart(opening_ids, None, 0, False, self.encode(f"\n{closing}\n"))
        content = self._content_length(response.output_tokens, closing)
        is_closed = content < response.output_len
        closing_ids = self.encode("\n" if is_closed else f"\n{closing}\n")
        return PathPart(opening_ids, response, content, is_closed, closing_ids)

    def _content_length(self, tokens: list[int], closing: str) -> int:
        """Return the number of tokens before the closing tag that ends ``tokens``, or of all tokens if there is no such tag.

        A token that contains other text before the tag's first characters counts as content.
        """
        for count in range(1, min(len(tokens), len(closing) + 1) + 1):
            tail = self.tokenizer.decode(tokens[-count:], skip_special_tokens=False)
            if closing in tail:
                begins_with_tag = tail.lstrip().startswith(closing)
                return len(tokens) - count + (0 if begins_with_tag else 1)
        return len(tokens)

    def _marked(self, part: PathPart) -> str:
        """Return the text of a part, with untrained tokens between marks as in the rollouts of the run directory."""
        row = BranchedSequence([], isolated=False)
        part.append_to(row, self.train_closing_tags)
        return marked_text(row.input_ids, row.loss_mask, self.tokenizer)
