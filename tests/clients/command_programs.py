"""Programs that are agents: what to set so that they ask the front and nobody else, and how they are run.

The settings are those of docs/agents.md, which is written from here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

#: What every program is asked: a file is read and a command is run, so both are in the record.
NOTE, TASK = "The number is 7341.", "Read note.txt, run a shell command, and tell the number."
#: A machine that others use, too, starts some of them in half a minute.
SECONDS = 240


@dataclass(frozen=True)
class CommandProgram:
    """A program.

    In its texts BASE is the ``base_url``, ROOT the same without ``/v1``, KEY the ``api_key``, MODEL the model's name, HOME its own
    home directory, and TASK what it is asked.

    Attributes:
        name: of its distribution.
        executable: that its distribution installs.
        arguments: of the command.
        environment: variables.
        files: of the home directory, path to content.
        answer: what it said at last, of its output and its home directory.
        is_of_node: npm has it; else PyPI.
        binaries: packages of npm of which the machine's platform has one; empty: it needs none.
        remark: for the docs.
    """

    name: str
    executable: str
    arguments: tuple[str, ...]
    answer: Callable[[str, Path], str]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    is_of_node: bool = True
    binaries: str = ""
    remark: str = ""


def _last(kind: str, *path: str) -> Callable[[str, Path], str]:
    """What the last line of a kind says, of a program whose output is a line of JSON for each event."""

    def answer(output: str, _: Path) -> str:
        events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        value = next(event for event in reversed(events) if event["type"] == kind)
        for name in path:
            value = value[name]
        return str(value)

    return answer


CODEX = CommandProgram(
    "@openai/codex",
    "codex",
    ("exec", "--skip-git-repo-check", "--ephemeral", "--json", "--dangerously-bypass-approvals-and-sandbox", "TASK"),
    _last("item.completed", "item", "text"),
    {"CODEX_HOME": "HOME/.codex", "ROLLWRIGHT_KEY": "KEY"},
    {
        ".codex/config.toml": """\
model = "MODEL"
model_provider = "rollwright"
check_for_update_on_startup = false

[model_providers.rollwright]
name = "rollwright"
base_url = "BASE"
env_key = "ROLLWRIGHT_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false
"""
    },
    binaries="@openai/codex-*",
    remark="`OPENAI_BASE_URL` alone is ignored. Its hosted web search is left out.",
)

CLAUDE = CommandProgram(
    "@anthropic-ai/claude-code",
    "claude",
    (
        *("-p", "TASK", "--tools", "Bash,Read", "--output-format", "stream-json", "--verbose"),
        *("--dangerously-skip-permissions", "--no-session-persistence"),
    ),
    _last("result", "result"),
    {
        "ANTHROPIC_BASE_URL": "ROOT",
        "ANTHROPIC_API_KEY": "KEY",
        "ANTHROPIC_MODEL": "MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "MODEL",
        "CLAUDE_CODE_SUBAGENT_MODEL": "MODEL",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "CLAUDE_CONFIG_DIR": "HOME/.claude",
        "IS_SANDBOX": "1",
    },
    binaries="@anthropic-ai/claude-code-*",
    remark="MODEL must not be `default`, which it takes for a model of Anthropic's: use `policy`. `IS_SANDBOX=1` lets root skip "
    "permissions. `--bare` makes its prompts a quarter as long.",
)

QWEN = CommandProgram(
    "@qwen-code/qwen-code",
    "qwen",
    (
        *("--bare", "--yolo", "--auth-type", "openai", "--model", "MODEL", "--openai-base-url", "BASE"),
        *("--openai-api-key", "KEY", "TASK"),
    ),
    lambda output, _: output.strip(),
    {"NO_COLOR": "1"},
    {
        ".qwen/settings.json": """\
{
  "general": {"enableAutoUpdate": false},
  "memory": {"enableManagedAutoMemory": false},
  "privacy": {"usageStatisticsEnabled": false},
  "telemetry": {"enabled": false}
}
"""
    },
    remark="Without `--bare` it offers more tools; the setting of `memory` saves a conversation of its own at the end.",
)

OPENCODE = CommandProgram(
    "opencode-ai",
    "opencode",
    ("run", "--format", "json", "--auto", "--model", "rollwright/MODEL", "TASK"),
    _last("text", "part", "text"),
    {
        "OPENCODE_CONFIG": "HOME/opencode.json",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "XDG_DATA_HOME": "HOME/data",
    },
    {
        "opencode.json": """\
{
  "provider": {
    "rollwright": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "BASE", "apiKey": "KEY"},
      "models": {"MODEL": {}}
    }
  },
  "model": "rollwright/MODEL",
  "small_model": "rollwright/MODEL",
  "agent": {"title": {"disable": true}},
  "autoupdate": false,
  "share": "disabled"
}
"""
    },
    binaries="opencode-*-*",
    remark="The setting of `agent` saves a call for a title, which would be a conversation of its own.",
)

MINI = CommandProgram(
    "mini-swe-agent",
    "mini",
    (
        *("--yolo", "--exit-immediately", "-t", "TASK", "-m", "MODEL", "--model-class", "litellm", "-c", "mini.yaml"),
        *("-c", "agent.cost_limit=0", "-c", "model.cost_tracking=ignore_errors"),
        *("-c", "model.model_kwargs.custom_llm_provider=openai", "-c", "model.model_kwargs.api_base=BASE"),
        *("-c", "model.model_kwargs.api_key=KEY", "-c", "model.model_kwargs.max_retries=0", "-o", "HOME/trajectory.json"),
    ),
    lambda _, home: json.loads((home / "trajectory.json").read_text())["info"]["submission"].strip(),
    {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    is_of_node=False,
)

PROGRAMS = {each.executable: each for each in (CODEX, CLAUDE, QWEN, OPENCODE, MINI)}


def run_command(program: CommandProgram, path: str, given: dict[str, str], more: tuple[str, ...] = ()) -> str:
    """Run a program in an empty home, and in a directory that has a note; returns its answer.

    Args:
        program: that is run.
        path: of executables.
        given: BASE, KEY and MODEL.
        more: arguments that stand before the others.
    """
    with tempfile.TemporaryDirectory(prefix="program-") as directory:
        home, work = Path(directory, "home"), Path(directory, "work")
        words = {**given, "ROOT": given["BASE"].removesuffix("/v1"), "HOME": str(home), "TASK": TASK}

        def filled(text: str) -> str:
            return re.sub(rf"\b({'|'.join(words)})\b", lambda match: words[match[1]], text)

        work.mkdir()
        (work / "note.txt").write_text(NOTE + "\n")
        for name, content in program.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(filled(content))
        home.mkdir(exist_ok=True)
        environment = {name: filled(value) for name, value in program.environment.items()}
        environment |= {"PATH": path, "HOME": str(home), "TMPDIR": directory, "LANG": "C.UTF-8"}
        process = subprocess.Popen(
            [program.executable, *more, *(filled(argument) for argument in program.arguments)],
            env=environment,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert process.returncode == 0, (
            f"{program.executable} ended with {process.returncode}:\n{output[-2500:]}\n{errors[-2500:]}"
        )
        return program.answer(output, home)


def described(program: CommandProgram) -> str:
    """What to set for a program, for the docs."""
    lines = [f"### {program.executable} (`{program.name}`)", ""]
    lines += [program.remark, ""] if program.remark else []
    lines += ["```"]
    lines += [f"export {name}={value}" for name, value in program.environment.items()]
    lines += [" ".join([program.executable, *program.arguments]), "```", ""]
    for name, content in program.files.items():
        lines += [f"`HOME/{name}`:", "", "```", *content.rstrip("\n").split("\n"), "```", ""]
    return "\n".join(lines) + "\n"
