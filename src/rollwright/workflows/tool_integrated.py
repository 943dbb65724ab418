"""Tool-integrated reasoning: the model writes Python, reads what it prints, and goes on reasoning."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import ConfigError
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.engine import InferenceEngine
from rollwright.processes.sandbox import SandboxLimits, SandboxResult, run_python
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.base import RolloutWorkflow
from rollwright.workflows.dumping import dump_sequence
from rollwright.workflows.prompting import (
    PromptFunction,
    as_gconfig,
    as_tokenizer,
    chat_input_ids,
    extract_messages,
    stopping_at,
)
from rollwright.workflows.registry import WORKFLOWS, resolve_function
from rollwright.workflows.script_output import script_output
from rollwright.workflows.side_by_side import one_group
from rollwright.workflows.turns import Turns

OPEN, CLOSE = "<python>", "</python>"
OUTPUT_TEMPLATE = "\n<output>\n{output}\n</output>\n"
SYSTEM_PROMPT = (
    "You may compute with Python. Write a script between <python> and </python>; what it prints is shown to you between "
    "<output> and </output>. Each script starts afresh. Then give the result between <answer> and </answer>."
)
_SCRIPT = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)


@WORKFLOWS.register_module("tool_integrated")
class ToolIntegratedWorkflow(RolloutWorkflow):
    """Reason, compute, reason, answer: one row for one episode; what scripts print is not trained on, and loses its end where
    the next turn would have no room.

    Scripts run in a process of their own with limits on time, memory, files, processes and network. **That is no security
    boundary**: it stops accidents, not attacks (see ``rewards.sandbox``).

    Args:
        reward_fn: scores the whole completion, scripts and outputs included; function, name or import path.
        gconfig: how each turn is sampled; ``</python>`` is added to its stop strings.
        tokenizer: the policy's tokenizer, or its path.
        max_turns: turns at most, so at most one script less.
        max_tokens: tokens of the whole episode.
        script_timeout: seconds that a script may run.
        script_limits: its other limits: ``SandboxLimits`` or a mapping of its fields.
        max_output_characters: of a script's output that are shown; the middle of longer output is left out.
        output_template: how output is shown, with ``{output}``.
        run_scripts: False: no script is run, and the model is told so (what is it worth without Python?).
        system_prompt: put before the task's messages unless they begin with one; empty for none.
        data_extract_prompt_fn: ``(task) -> messages`` or text; None: the task's ``messages``.
        rollout_stat_scope: scope of the metrics.
        dump_dir: where each episode is written to, readable; None: nowhere.
        reward_timeout: seconds that the reward function may take.

    Where ``gconfig.n_samples`` is above 1 and nobody repeats the task, the workflow makes the group itself.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int = 4,
        max_tokens: int = 4096,
        script_timeout: float = 10.0,
        script_limits: SandboxLimits | dict[str, Any] | None = None,
        max_output_characters: int = 2000,
        output_template: str = OUTPUT_TEMPLATE,
        run_scripts: bool = True,
        system_prompt: str = SYSTEM_PROMPT,
        data_extract_prompt_fn: PromptFunction | str | None = None,
        rollout_stat_scope: str = "rollout",
        dump_dir: str | None = None,
        reward_timeout: float = 15.0,
    ) -> None:
        if max_turns < 1 or max_tokens < 1 or script_timeout <= 0 or max_output_characters < 1:
            raise ConfigError(
                "ToolIntegratedWorkflow: max_turns, max_tokens, script_timeout and max_output_characters are above 0."
            )
        if "{output}" not in output_template:
            raise ConfigError(f"ToolIntegratedWorkflow: output_template has no {{output}}: {output_template[:80]!r}.")
        self.tokenizer = as_tokenizer(tokenizer)
        self.gconfig = stopping_at(as_gconfig(gconfig, self.tokenizer), CLOSE)
        self.reward = AsyncRewardWrapper(reward_fn, timeout_seconds=reward_timeout)
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.script_timeout = script_timeout
        self.script_limits = _as_limits(script_limits)
        self.max_output_characters = max_output_characters
        self.output_template = output_template
        self.run_scripts = run_scripts
        self.system_prompt = system_prompt
        self.data_extract_prompt_fn = resolve_function(data_extract_prompt_fn or extract_messages, "data_extract_prompt_fn")
        self.tracker = get_tracker(rollout_stat_scope)
        self.dump_dir = dump_dir

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        """See ``RolloutWorkflow``. An aborted episode is rejected."""
        return await one_group(self._sample(engine, data) for _ in range(self.gconfig.n_samples))

    async def _sample(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        prompt_ids = chat_input_ids(self._prompt(data), self.tokenizer)
        turns = Turns(engine, prompt_ids, self.gconfig, self.tokenizer, max_turns=self.max_turns, max_tokens=self.max_tokens)
        scripts = failed_scripts = 0
        async for response in turns:
            script = parse_script(self.tokenizer.decode(response.output_tokens, skip_special_tokens=True))
            if response.truncated or script is None or turns.is_last:  # after the last turn nobody would read its output
                break
            result = await self._run(script)
            scripts += 1
            failed_scripts += not result.ok
            turns.append_filled(self.output_template, output=self._shown(result))
        if turns.is_aborted:
            return None

        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        completion = self.tokenizer.decode(turns.completion_ids, skip_special_tokens=True)
        reward = await self.reward(prompt, completion, prompt_ids, turns.completion_ids, **data)
        facts = {"turns": turns.count, "scripts": scripts, "failed_scripts": failed_scripts}
        self.tracker.scalar(**facts, episode_reward=reward)
        if self.dump_dir is not None:
            await dump_sequence(self.dump_dir, turns, self.tokenizer, data, {"reward": reward, **facts})
        return turns.row(reward)

    async def _run(self, script: str) -> SandboxResult:
        if not self.run_scripts:
            return SandboxResult("Python is switched off.", "", 0, False, 0.0)
        return await run_python(script, timeout=self.script_timeout, limits=self.script_limits)

    def _prompt(self, data: dict[str, Any]) -> Any:
        prompt = self.data_extract_prompt_fn(data)
        if isinstance(prompt, str) or not self.system_prompt or prompt[0].get("role") == "system":
            return prompt
        return [{"role": "system", "content": self.system_prompt}, *prompt]

    def _shown(self, result: SandboxResult) -> str:
        return script_output(result, self.script_timeout, self.max_output_characters)


def _as_limits(limits: SandboxLimits | Mapping[str, Any] | None) -> SandboxLimits:
    if isinstance(limits, SandboxLimits):
        return limits
    known = [field.name for field in fields(SandboxLimits)]
    if unknown := sorted(set(limits or {}) - set(known)):
        raise ConfigError(f"ToolIntegratedWorkflow: script_limits has {', '.join(unknown)}; it may hold {', '.join(known)}.")
    return SandboxLimits(**(limits or {}))


def parse_script(text: str) -> str | None:
    """The last script of a turn, without its common indentation; None where the turn does not end with one."""
    if not text.rstrip().endswith(CLOSE):
        return None
    found = _SCRIPT.findall(text)
    return textwrap.dedent(found[-1]).strip("\n") if found else ""
