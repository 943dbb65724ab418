"""Programs that are agents: which preset starts each, and what it said. They run in a box, as ``CommandAgentWorkflow`` runs them.

Their settings are the presets of ``rollwright.workflows.command_presets``; docs/agents.md shows them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollwright.processes.box import BoxLimits, BoxSpec
from rollwright.processes.boxes import make_box, programs_in
from rollwright.workflows.command_agent import (
    FRONT_PORT,
    HOME,
    WORKDIR,
    run_command,
    temporary_directory,
    upload_files,
)
from rollwright.workflows.command_presets import COMMAND_AGENTS, CommandAgent

#: What every program is asked: a file is read and a command is run, so both are in the record.
NOTE, TASK = "The number is 7341.", "Read note.txt, run a shell command, and tell the number."
#: A machine that others use, too, starts some of them in a minute, and reads their first prompts in another.
SECONDS = 480


@dataclass(frozen=True)
class CommandProgram:
    """A program.

    Attributes:
        preset: name of its preset.
        name: name of its distribution.
        answer: what it said at last, from its output and a copy of its home directory.
        is_of_node: npm has it; else PyPI.
        binaries: packages of npm of which the machine's platform has one; empty: it needs none.
    """

    preset: str
    name: str
    answer: Callable[[str, Path], str]
    is_of_node: bool = True
    binaries: str = ""

    @property
    def agent(self) -> CommandAgent:
        """Its preset."""
        return COMMAND_AGENTS.get(self.preset)


def _last(kind: str, *path: str) -> Callable[[str, Path], str]:
    """What the last line of a kind says, of a program whose output is a line of JSON for each event."""

    def answer(output: str, _: Path) -> str:
        events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        value = next(event for event in reversed(events) if event["type"] == kind)
        for name in path:
            value = value[name]
        return str(value)

    return answer


def _submission(_: str, home: Path) -> str:
    return json.loads((home / "trajectory.json").read_text())["info"]["submission"].strip()


CODEX = CommandProgram("codex", "@openai/codex", _last("item.completed", "item", "text"), binaries="@openai/codex-*")
CLAUDE = CommandProgram(
    "claude-code", "@anthropic-ai/claude-code", _last("result", "result"), binaries="@anthropic-ai/claude-code-*"
)
QWEN = CommandProgram("qwen-code", "@qwen-code/qwen-code", lambda output, _: output.strip())
OPENCODE = CommandProgram("opencode", "opencode-ai", _last("text", "part", "text"), binaries="opencode-*-*")
MINI = CommandProgram("mini-swe-agent", "mini-swe-agent", _submission, is_of_node=False)

PROGRAMS = {each.agent.program: each for each in (CODEX, CLAUDE, QWEN, OPENCODE, MINI)}


def form_of(program: CommandProgram, case: str) -> CommandAgent:
    """How a case starts a program: as its preset does, in another form, or with what the preset switches off."""
    agent = program.agent
    if case in ("whole", "sub_agent"):
        words = [word for word in agent.words if word != "--bare"]
        more = ",Agent" if case == "sub_agent" else ""
        return replace(agent, command=[word + more if word == "Bash,Edit,Read" else word for word in words])
    if case == "retried":  # the presets of Codex and Claude Code switch retries off; opencode has no such setting
        files = {name: re.sub(r"\w+_max_retries = 0\n", "", text) for name, text in agent.files.items()}
        kept = {name: text for name, text in agent.environment.items() if name != "CLAUDE_CODE_MAX_RETRIES"}
        return replace(agent, files=files, environment=kept)
    if case == "titled":
        return replace(agent, files={name: text.replace('"disable": true', "") for name, text in agent.files.items()})
    return agent


def settings_of(case: Any) -> dict[str, Any]:
    """What a case's episode is opened with, as ``CommandAgentWorkflow`` does it; nothing for other clients."""
    if case.program not in PROGRAMS:
        return {}
    return {"side_conversations": PROGRAMS[case.program].agent.side_conversations, "resamples_equal": False}


async def run_in_box(program: CommandProgram, agent: CommandAgent, environment: Path, socket: Path, api_key: str) -> str:
    """Run a program in a bubblewrap box whose working directory has a note; returns its answer.

    Args:
        program: the program.
        agent: how it is started.
        environment: directory that it is installed in.
        socket: Unix socket of the front.
        api_key: key of the episode.
    """
    programs = programs_in([str(environment)])
    limits = BoxLimits(memory_bytes=4 * 2**30)
    spec = BoxSpec(limits, {FRONT_PORT: socket}, programs.readable, writable=(WORKDIR, HOME, "/tmp"))
    box = make_box("bubblewrap", spec)
    await box.start()
    try:
        root_url = box.url(FRONT_PORT)
        values = {"base_url": f"{root_url}/v1", "root_url": root_url, "api_key": api_key}
        values |= {"model": "policy", "task": TASK, "home": box.home}
        await upload_files(box, {"files": {"note.txt": NOTE + "\n"}})
        ended = await run_command(box, agent, values, programs, SECONDS)
        assert ended.ok, (
            f"{agent.program} ended with {ended.exit_code} {ended.excess}:\n{ended.stdout[-2500:]}\n{ended.stderr[-2500:]}"
        )
        async with temporary_directory() as home:
            if program is MINI:
                await box.download(box.home, home)
            return program.answer(ended.stdout, home)
    finally:
        await box.stop()


def described(program: CommandProgram) -> str:
    """What is set for a program, for the docs."""
    agent = program.agent
    lines = [f"### {program.preset} (`{program.name}`)", ""]
    lines += [agent.remark, ""] if agent.remark else []
    lines += ["```"]
    lines += [f"export {name}={value}" for name, value in agent.environment.items()]
    lines += [" ".join(word if word.startswith("{") else shlex.quote(word) for word in agent.words), "```", ""]
    for name, content in agent.files.items():
        lines += [f"`{{home}}/{name}`:", "", "```", *content.rstrip("\n").split("\n"), "```", ""]
    for rule in agent.side_conversations:
        how = f"the model `{rule.model}`" if rule.model else f"a system prompt with `{rule.system}`"
        how = f"the header `{rule.header}`" if rule.header else how
        lines += [f"{'Sub-agents' if rule.trained else 'Not trained'}: calls with {how} ({rule.name}).", ""]
    return "\n".join(lines) + "\n"
