"""Tool-integrated reasoning: the model writes Python, reads the output, and continues."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import astuple, fields
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.formats import with_system
from rollwright.errors import ConfigError
from rollwright.experience.durable import durable
from rollwright.inference.engine import InferenceEngine
from rollwright.processes.sandbox import SandboxLimits, SandboxResult, run_python, sandboxed
from rollwright.workflows.episode import EpisodeWorkflow, PromptFunction, chat_input_ids
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.tool_calling import script_output
from rollwright.workflows.turns import Turns

OPEN, CLOSE = "<python>", "</python>"
OUTPUT_TEMPLATE = "\n<output>\n{output}\n</output>\n"
SYSTEM_PROMPT = (
    "You may compute with Python. Write a script between <python> and </python>; what it prints is shown to you between "
    "<output> and </output>. Each script starts afresh. Then give the result between <answer> and </answer>."
)
_SCRIPT = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)


@WORKFLOWS.register_module("tool_integrated")
class ToolIntegratedWorkflow(EpisodeWorkflow):
    """Lets the model compute with Python scripts while it reasons; one row for each episode.

    The output of scripts is not trained on, and is cut if the next turn would have no room. Each episode has its own jail in the
    sandbox that ``rollout.sandbox`` names (docs/sandbox.md).

    Args:
        reward_fn: scores the whole completion, scripts and outputs included; function, name or import path.
        gconfig: how each turn is sampled; ``</python>`` is added to its stop strings.
        max_turns: maximum number of turns. No script runs after the last one.
        max_tokens: maximum number of tokens of the whole episode.
        script_timeout: seconds that a script may run.
        script_limits: other limits of a script: ``SandboxLimits`` or a mapping of its fields.
        max_output_characters: characters of a script's output that are shown; the middle of longer output is left out.
        output_template: template of the output; placeholder ``{output}``.
        run_scripts: False runs no scripts and tells the model so, to measure how much Python helps.
        system_prompt: put before the task's messages unless they begin with one; empty for none.

    The other arguments are those of :class:`EpisodeWorkflow`. If ``gconfig.n_samples`` is above 1 and the caller does not repeat the
    task, the workflow runs the group itself.
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
        super().__init__(
            reward_fn,
            gconfig,
            tokenizer,
            rollout_stat_scope=rollout_stat_scope,
            dump_dir=dump_dir,
            data_extract_prompt_fn=data_extract_prompt_fn,
            reward_timeout=reward_timeout,
        )
        self.stop_at(CLOSE)
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.script_timeout = script_timeout
        if not isinstance(script_limits, SandboxLimits):
            known = [field.name for field in fields(SandboxLimits)]
            if unknown := sorted(set(script_limits or {}) - set(known)):
                raise ConfigError(
                    f"ToolIntegratedWorkflow: script_limits has {', '.join(unknown)}; it may hold {', '.join(known)}."
                )
            script_limits = SandboxLimits(**(script_limits or {}))
        self.script_limits = script_limits
        self.max_output_characters = max_output_characters
        self.output_template = output_template
        self.run_scripts = run_scripts
        self.system_prompt = system_prompt

    @staticmethod
    def uses_sandbox(arguments: Mapping[str, Any]) -> bool:
        """Return whether a workflow with these arguments runs Python that the model writes."""
        return bool(arguments.get("run_scripts", True))

    async def episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Alternate reasoning and scripts; return one row."""
        with sandboxed():
            return await self._episode(engine, data)

    async def _run(self, script: str) -> list[Any]:
        return list(astuple(await run_python(script, timeout=self.script_timeout, limits=self.script_limits)))

    async def _episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        prompt = self.data_extract_prompt_fn(data)
        if not isinstance(prompt, str):
            prompt = with_system(prompt, self.system_prompt)
        prompt_ids = chat_input_ids(prompt, self.tokenizer)
        turns = Turns(engine, prompt_ids, self.gconfig, self.tokenizer, max_turns=self.max_turns, max_tokens=self.max_tokens)
        scripts = failed_scripts = 0
        async for response in turns:
            script = parse_script(self.tokenizer.decode(response.output_tokens, skip_special_tokens=True))
            if response.truncated or script is None or turns.is_last:  # nobody would read its output after the last turn
                break
            if self.run_scripts:
                result = SandboxResult(*await durable("python").awaited(self._run, script))
            else:
                result = SandboxResult("Python is switched off.", "", 0, False, 0.0)
            scripts += 1
            failed_scripts += not result.ok
            turns.append_filled(
                self.output_template, output=script_output(result, self.script_timeout, self.max_output_characters)
            )
        if turns.is_aborted:
            return None
        reward = await self.score(prompt_ids, turns.completion_ids, data)
        return await self.end(turns, data, reward, turns=turns.count, scripts=scripts, failed_scripts=failed_scripts)


def parse_script(text: str) -> str | None:
    """Return the last script of a turn, without its common indentation, or None if the turn does not end with a script."""
    if not text.rstrip().endswith(CLOSE):
        return None
    found = _SCRIPT.findall(text)
    return textwrap.dedent(found[-1]).strip("\n") if found else ""
