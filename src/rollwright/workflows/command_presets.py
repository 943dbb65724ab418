"""Command-line agents: how a program is started so that it asks the run's model and nothing else, and presets for known programs.

A user's own preset takes five lines::

    COMMAND_AGENTS["my-agent"] = CommandAgent(
        command="my-agent --url {base_url} --key {api_key} --model {model} --yes {task}",
        environment={"MY_AGENT_TELEMETRY": "0"},
        files={".my-agent/config.toml": "auto_update = false"},
    )
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rollwright.errors import WorkflowError
from rollwright.inference.front.side_conversations import SideConversation, side_conversations
from rollwright.registry import Registry
from rollwright.workflows.turns import fill

#: Placeholders of a command line, and what they stand for.
PLACEHOLDERS = {
    "base_url": "base URL for OpenAI's clients, which ends with /v1",
    "root_url": "the same without /v1, for Anthropic's clients",
    "api_key": "key of the episode",
    "model": "name of the model",
    "task": "text of the task",
    "home": "home directory of the episode",
}
#: Beginning of the placeholder of an opponent's key: ``{api_key:NAME}``.
KEY_OF = "api_key:"
#: Model that presets name for side conversations, if the program can use a second model for them.
SIDE_MODEL = "policy-side"


@dataclass(frozen=True)
class CommandAgent:
    """How a command-line agent is started.

    Texts may contain ``PLACEHOLDERS`` in braces. Other braces are kept.

    Attributes:
        command: program and arguments. A string is split like a shell's line, before placeholders are filled in, so a task with spaces
            remains one argument.
        environment: environment variables.
        files: files in the home directory: path -> content.
        stdin: standard input.
        side_conversations: recognise the program's calls that are not trained, such as those for titles, and those of its sub-agents.
        imports: modules of a Python program that a process in the box imports once. It forks for each episode, whose program then starts
            without its imports. Of the ``environment``, the values without placeholders are set during the imports.
        install: command that installs the program.
        remark: note for the documentation.
    """

    command: str | Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    side_conversations: Sequence[SideConversation | Mapping[str, Any]] = ()
    imports: Sequence[str] = ()
    install: str = ""
    remark: str = ""

    def __post_init__(self) -> None:
        texts = [*self.words, *self.environment.values(), *self.files.values(), self.stdin]
        if not self.words or not all(isinstance(text, str) for text in texts):
            raise WorkflowError(
                f"command-line agent {self.command!r}: its command has at least one word, and all values are strings (quote numbers)."
            )
        if isinstance(self.imports, str) or not all(isinstance(name, str) for name in self.imports):
            raise WorkflowError(f"command-line agent {self.program!r}: imports is {self.imports!r}; give a list of modules.")
        object.__setattr__(self, "side_conversations", side_conversations(self.side_conversations))
        if not any("{base_url}" in text or "{root_url}" in text for text in texts):
            raise WorkflowError(
                f"command-line agent {self.program!r}: nothing tells it where its model is. Put {{base_url}}, or {{root_url}} (without "
                "/v1), into its command, environment or files."
            )
        if not any("{task}" in text for text in texts):
            raise WorkflowError(
                f"command-line agent {self.program!r}: nothing tells it its task. Put {{task}} into its command."
            )

    @property
    def words(self) -> list[str]:
        """The command as a list of words, placeholders included."""
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command)

    @property
    def fixed_variables(self) -> dict[str, str]:
        """The environment variables without placeholders."""
        return {
            name: text
            for name, text in self.environment.items()
            if f"{{{KEY_OF}" not in text and not any(f"{{{each}}}" in text for each in PLACEHOLDERS)
        }

    def refuse_unknown_keys(self, known: Sequence[str]) -> None:
        """Check the names in placeholders ``{api_key:NAME}``.

        Args:
            known: names of the opponents.

        Raises:
            WorkflowError: there is no opponent of a name, or an opponent whose key the program does not get.
        """
        texts = "\n".join([*self.words, *self.environment.values(), *self.files.values(), self.stdin])
        named = set(re.findall(rf"\{{{KEY_OF}([^{{}}\n]*)\}}", texts))
        if wrong := sorted(named ^ set(known)):
            raise WorkflowError(
                f"command-line agent {self.program!r}: it gets keys of the opponents {', '.join(sorted(named)) or '(none)'}, and the workflow has "
                f"{', '.join(sorted(known)) or '(none)'}: {', '.join(wrong)} is in one of the two only. Name each opponent in "
                f"workflow_kwargs.opponents, and put {{{KEY_OF}NAME}} into the agent's command, environment or files."
            )

    @property
    def program(self) -> str:
        """Name of the program."""
        return self.words[0]

    def command_line(self, values: Mapping[str, str]) -> list[str]:
        """Return the command with ``values`` in place of its placeholders."""
        task = values["task"]
        safe = {**values, "task": f" {task}" if task.startswith("-") else task}  # a program would take it for an option
        return [fill(word, **safe) for word in self.words]

    def variables(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with ``values`` in place of its placeholders."""
        return {name: fill(text, **values) for name, text in self.environment.items()}

    def home_files(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return the home directory's files with ``values`` in place of their placeholders."""
        return {name: fill(text, **values) for name, text in self.files.items()}

    @classmethod
    def of(cls, given: Any) -> CommandAgent:
        """Return the agent that a config gives: a ``CommandAgent``, a preset's name, an import path, or a mapping of the fields.

        A mapping with the key ``preset`` changes that preset: its ``environment`` and ``files`` are added to the preset's, ``arguments``
        are appended to the preset's command, and other fields replace the preset's.

        Raises:
            WorkflowError: there is no such preset, or the mapping has an unknown key.
        """
        if isinstance(given, CommandAgent):
            return given
        if isinstance(given, str):
            return COMMAND_AGENTS.get(given)
        known = [*(each.name for each in fields(cls)), "preset", "arguments"]
        if not isinstance(given, Mapping) or not set(given) <= set(known):
            raise WorkflowError(
                f"agent: {given!r:.200} is no command-line agent; give a preset's name, or a mapping of {', '.join(known)}."
            )
        changes = dict(given)
        preset, arguments = changes.pop("preset", None), changes.pop("arguments", ())
        if preset is None:
            if "command" not in changes or arguments:
                raise WorkflowError("agent: give its command, or the preset whose command gets further arguments.")
            return cls(**changes)
        base = cls.of(preset)
        more = shlex.split(arguments) if isinstance(arguments, str) else list(arguments)
        settings = {each.name: getattr(base, each.name) for each in fields(cls)} | changes
        settings["command"] = changes.get("command", [*base.words, *more])
        for name in ("environment", "files"):
            settings[name] = {**getattr(base, name), **changes.get(name, {})}
        return cls(**settings)


def _is_agent(entry: Any) -> bool:
    return isinstance(entry, CommandAgent)


#: Presets by name. Users add theirs, or name a ``CommandAgent`` by its import path.
COMMAND_AGENTS: Registry[CommandAgent] = Registry(
    "command-line agent",
    WorkflowError,
    variable="COMMAND_AGENTS",
    entry_points="rollwright.command_agents",
    built_in={
        "mini-swe-agent": "rollwright.workflows.command_presets:MINI_SWE_AGENT",
        "claude-code": "rollwright.workflows.command_presets:CLAUDE_CODE",
        "codex": "rollwright.workflows.command_presets:CODEX",
        "qwen-code": "rollwright.workflows.command_presets:QWEN_CODE",
        "opencode": "rollwright.workflows.command_presets:OPENCODE",
    },
    accepts=_is_agent,
)

MINI_SWE_AGENT = CommandAgent(
    "mini --yolo --exit-immediately -t {task} -m {model} --model-class litellm -c mini.yaml -c agent.cost_limit=0 "
    "-c model.cost_tracking=ignore_errors -c model.model_kwargs.custom_llm_provider=openai "
    "-c model.model_kwargs.api_base={base_url} -c model.model_kwargs.api_key={api_key} -c model.model_kwargs.max_retries=0 "
    "-o {home}/trajectory.json",
    {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    imports=(
        *("minisweagent.run.mini", "minisweagent.agents.interactive", "minisweagent.environments.local"),
        *("minisweagent.models.litellm_model", "minisweagent.models.litellm_textbased_model", "httpcore"),
        *("openai.resources", "openai.resources.beta", "openai.lib.streaming.chat"),  # which the first call would import
    ),
    install="pip install mini-swe-agent 'mcp>=2'",
    remark="It has one tool and the shortest prompts (800 tokens), so it suits small models best.",
)

CLAUDE_CODE = CommandAgent(
    "claude --bare -p {task} --tools Bash,Edit,Read --output-format stream-json --verbose --dangerously-skip-permissions "
    "--no-session-persistence",
    {
        "ANTHROPIC_BASE_URL": "{root_url}",
        "ANTHROPIC_API_KEY": "{api_key}",
        "ANTHROPIC_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": SIDE_MODEL,
        "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "CLAUDE_CONFIG_DIR": "{home}/.claude",
        "IS_SANDBOX": "1",
    },
    side_conversations=(
        SideConversation("background", model=SIDE_MODEL),
        SideConversation("agent", header="x-claude-code-agent-id", trained=True),
    ),
    install="npm install @anthropic-ai/claude-code",
    remark="The model must not be called `default`, which it takes for a model of Anthropic's: use `policy`. `IS_SANDBOX=1` lets root "
    "skip permissions. Without `--bare`, its prompts are four times as long.",
)

CODEX = CommandAgent(
    "codex exec --skip-git-repo-check --ephemeral --json --dangerously-bypass-approvals-and-sandbox {task}",
    {"CODEX_HOME": "{home}/.codex", "ROLLWRIGHT_KEY": "{api_key}"},
    {
        ".codex/config.toml": """\
model = "{model}"
model_provider = "rollwright"
check_for_update_on_startup = false

[model_providers.rollwright]
name = "rollwright"
base_url = "{base_url}"
env_key = "ROLLWRIGHT_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false
"""
    },
    side_conversations=(
        SideConversation("memory", system="Memory Writing Agent"),
        SideConversation("agent", header="x-openai-subagent", trained=True),
    ),
    install="npm install @openai/codex",
    remark="`OPENAI_BASE_URL` alone is ignored. Its hosted web search is left out.",
)

QWEN_CODE = CommandAgent(
    "qwen --bare --yolo --auth-type openai --model {model} --openai-base-url {base_url} --openai-api-key {api_key} {task}",
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
    side_conversations=(
        SideConversation("memory", system="managed memory extraction subagent"),
        SideConversation("agent", system="You operate in non-interactive mode: do not ask the user", trained=True),
    ),
    install="npm install @qwen-code/qwen-code",
    remark="Without `--bare` it offers more tools. The setting of `memory` saves a conversation at the end.",
)

OPENCODE = CommandAgent(
    "opencode run --format json --auto --model rollwright/{model} {task}",
    {
        "OPENCODE_CONFIG": "{home}/opencode.json",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "XDG_DATA_HOME": "{home}/data",
    },
    {
        "opencode.json": """\
{
  "provider": {
    "rollwright": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
      "models": {"{model}": {}, "policy-side": {}}
    }
  },
  "model": "rollwright/{model}",
  "small_model": "rollwright/policy-side",
  "agent": {"title": {"disable": true}},
  "autoupdate": false,
  "share": "disabled"
}
"""
    },
    side_conversations=(
        SideConversation("background", model=SIDE_MODEL),
        SideConversation("title", system="You are a title generator"),
        SideConversation("task", header="x-parent-session-id", trained=True),
    ),
    install="npm install opencode-ai",
    remark="The setting of `agent` saves a call for a title.",
)
