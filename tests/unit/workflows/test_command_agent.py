"""Command-line agents in a real box: a small program that runs the model's replies as shell commands."""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path

import pytest
from parts import Script, sampled, tool_tokenizer

from rollwright.config.generation import GenerationHyperparameters
from rollwright.environments.harbor.tasks import harbor
from rollwright.errors import ConfigError, RewardError, SandboxError, WorkflowError
from rollwright.experience.normaliser import normalise
from rollwright.processes.sandbox import check_sandbox, sandboxed
from rollwright.workflows.command_agent import CommandAgentWorkflow
from rollwright.workflows.command_presets import COMMAND_AGENTS, CommandAgent
from tests.conftest import usable_box

PROGRAM = """#!/usr/bin/env python3
import json, os, subprocess, sys, time, urllib.error, urllib.request

base_url, key, model, task, *more = sys.argv[1:]
if "silent" in more:
    sys.exit("no model, no work")


def ask(messages, model=model, key=key):
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]


if "rival" in more:
    assert ask([{"role": "user", "content": "You?"}], key=more[-1]) == "me"
if "titled" in more:
    ask([{"role": "user", "content": "Title: " + task}], "small")
messages = [{"role": "user", "content": task}]
while True:
    try:
        said = ask(messages)
    except urllib.error.HTTPError:
        if "stubborn" not in more:
            raise
        time.sleep(60)
    if "twice" in more:
        assert ask(messages) == said
    if said == "done":
        break
    done = subprocess.run(said, shell=True, capture_output=True, text=True)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": done.stdout + done.stderr}]
print("worked in", os.getcwd())
"""
COMMAND = "asker {base_url} {api_key} {model} {task}"


@pytest.fixture(scope="module")
def tokenizer():
    return tool_tokenizer()


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A directory with the program, as users have one."""
    directory = tmp_path_factory.mktemp("programs")
    program = directory / "asker"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return str(directory)


async def file_is_copied(prompt, completion, prompt_ids, completion_ids, *, workdir, transcript, stdout, exit_code, **row):
    assert prompt == "Copy a."
    assert completion == transcript[-1]["content"] == "done"
    assert "worked in /app" in stdout
    assert exit_code == 0
    return float((workdir / "b.txt").read_text() == row["files"]["a.txt"])


async def one(*_, **columns):
    return 1.0


@pytest.fixture(scope="module", autouse=True)
def _boxes_start(request):
    try:
        check_sandbox("bubblewrap")
    except SandboxError as error:
        pytest.skip(f"bubblewrap does not work here: {error}")


def workflow_of(tokenizer, programs, agent=COMMAND, **arguments):
    agent = agent if isinstance(agent, dict | CommandAgent) else {"command": agent}
    settings = {"programs": [programs], "timeout": 60, "gconfig": GenerationHyperparameters(max_new_tokens=60)}
    if "verifier" not in arguments:
        settings["reward_fn"] = one
    return CommandAgentWorkflow(agent, tokenizer, **{**settings, **arguments})


async def run(workflow, engine, **row):
    sample = sampled(engine)
    row = {"messages": [{"role": "user", "content": "Copy a."}], "files": {"a.txt": "hello\n"}, **row}
    try:
        return sample, await workflow.arun_episode(sample, row)
    finally:
        workflow.front.close()


@pytest.fixture(params=["bubblewrap", "http"])
def in_box(request):
    """Episodes of a test have boxes of a kind."""
    with sandboxed(usable_box(request.param)):
        yield


@pytest.mark.usefixtures("in_box")
async def test_a_program_works_in_its_box_and_is_trained_on_its_calls(tokenizer, programs):
    engine = Script(tokenizer, "cat a.txt > b.txt", "done", version=5)
    sample, experiences = await run(workflow_of(tokenizer, programs, reward_fn=file_is_copied), engine)
    (row,) = experiences
    assert row.reward == 1.0
    records = sample.recorder.records
    assert row.response_tokens[row.action_mask].tolist() == [token for record in records for token in record.output_ids]
    assert int(normalise(experiences, sample.recorder)["loss_mask"].sum()) == sum(len(r.output_ids) for r in records)


async def test_a_program_asks_a_frozen_opponent_with_another_key(tokenizer, programs, tmp_path, monkeypatch):
    other = Script(tokenizer, "me", version=0)
    monkeypatch.setattr("rollwright.workflows.opponents.Opponents.engine", lambda self, path: other)
    engine = Script(tokenizer, "cat a.txt > b.txt", "done", version=5)
    workflow = workflow_of(tokenizer, programs, COMMAND + " rival {api_key:old}", opponents={"old": str(tmp_path)})
    sample, experiences = await run(workflow, engine)
    assert [(each.agent, each.trainable, each.reward) for each in experiences] == [("policy", None, 1.0), ("old", False, -1.0)]
    rows = normalise(experiences, sample.recorder)
    assert rows["loss_mask"].sum(1).tolist() == [sum(len(r.output_ids) for r in sample.recorder.records[1:]), 0]
    assert len(other.requests) == 1


@pytest.mark.parametrize("command", [COMMAND, COMMAND + " {api_key:new}", COMMAND + " {api_key:old} {api_key:new}"])
def test_each_opponent_has_a_key_in_the_agents_texts(tokenizer, programs, tmp_path, command):
    with pytest.raises(WorkflowError, match=r"is in one of the two only.*\{api_key:NAME\}"):
        workflow_of(tokenizer, programs, command, opponents={"old": str(tmp_path)})


@pytest.mark.usefixtures("in_box")
async def test_a_task_folder_brings_its_files_and_tests(tokenizer, programs, tmp_path):
    files = {
        "task.toml": "",
        "instruction.md": "Copy a.",
        "environment/a.txt": "hello\n",
        "tests/test.sh": "#!/bin/sh\ncmp a.txt b.txt && echo 0.5 > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / name).write_text(text)
    (row,) = harbor(path=str(tmp_path / "t"))
    engine = Script(tokenizer, "cp a.txt b.txt; ls /tests", "done")
    sample, experiences = await run(workflow_of(tokenizer, programs, verifier="task"), engine, **row)
    assert [each.reward for each in experiences] == [0.5]
    assert len(sample.recorder.records) == 2
    with pytest.raises(WorkflowError, match=r"set workflow_kwargs\.verifier to 'task'"):
        await run(workflow_of(tokenizer, programs), Script(tokenizer, "done"), **row)


async def test_each_episode_has_a_home_of_its_own_and_sees_nothing_else(tokenizer, programs):
    """What one episode leaves is not there in the next; the machine's files, processes and network are not there at all."""
    look = (
        "ls -A $HOME; touch $HOME/left /tmp/left; ls /tmp; cat ~/.config; ls /work; ps aux | wc -l; "
        "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 80), 2)' 2>&1 | tail -1"
    )
    agent = {"command": COMMAND, "files": {".config": "key={api_key}"}}
    seen = []
    for _ in range(2):
        workflow = workflow_of(tokenizer, programs, agent)
        sample, _ = await run(workflow, Script(tokenizer, look, "done", context_length=8000))
        seen.append(tokenizer.decode(sample.recorder.records[1].prompt_ids))
    for text in seen:
        assert text.count("key=rollwright-") == 1
        assert "Network is unreachable" in text
        assert "left" not in text.split(look)[1].replace("left", "", 1)  # of /tmp, its own
    keys = [text.split("key=")[1].split("\n")[0] for text in seen]
    assert keys[0] != keys[1]


async def test_a_python_program_starts_with_its_imports_done_and_sees_nothing_else(tokenizer, programs):
    """The box and the process that holds the imports stay; homes, files, keys and what was left are the episode's own."""
    look = "ls -A $HOME /tmp; cat ~/.config; touch $HOME/left /tmp/left; setsid sleep 3600 > /dev/null 2>&1 & sleep 0.5; pgrep -c sleep; echo $KEY"
    agent = {
        "command": COMMAND,
        "files": {".config": "key={api_key}"},
        "environment": {"KEY": "{api_key}", "FIXED": "1"},
        "imports": ["urllib.request", "json", "subprocess"],
    }

    async def is_copied(*_, workdir, **columns):
        return float((workdir / "b.txt").read_text() == "hello\n")

    workflow = workflow_of(tokenizer, programs, agent, reward_fn=is_copied, boxes=1)
    seen = []
    for _ in range(2):
        engine = Script(tokenizer, look, "cat a.txt > b.txt", "done", context_length=8000)
        sample = sampled(engine)
        data = {"messages": [{"role": "user", "content": "Copy a."}], "files": {"a.txt": "hello\n"}}
        (row,) = await workflow.arun_episode(sample, data)
        assert row.reward == 1.0
        seen.append(tokenizer.decode(sample.recorder.records[1].prompt_ids).split(look)[1])
    workflow.front.close()
    keys = [re.search(r"key=(rollwright-[\w-]{32})", text)[1] for text in seen]
    assert keys[0] != keys[1]
    assert seen[0].replace(keys[0], "KEY") == seen[1].replace(keys[1], "KEY")
    assert "key=KEY1\nKEY\n" in seen[0].replace(keys[0], "KEY")
    assert "left" not in seen[1]


async def test_a_program_that_is_no_python_has_no_imports(tokenizer, programs):
    agent = {"command": COMMAND.replace("asker", "ls"), "imports": ["json"]}
    with pytest.raises(
        WorkflowError, match=r"ls is no Python script, so it cannot be started .* or leave them out \(imports: \[\]\)"
    ):
        await run(workflow_of(tokenizer, programs, agent), Script(tokenizer))
    with pytest.raises(WorkflowError, match="imports is 'json'; give a list of modules"):
        CommandAgent.of({**agent, "imports": "json"})


VERIFIER = """
import json, pathlib, sys
row = json.load(open("/tests/task.json"))
copied = pathlib.Path("b.txt")
assert not pathlib.Path("/tmp/left").exists(), "a box of its own"
if not copied.exists():
    sys.exit(1)
print("compared")
print(0.5 if copied.read_text() == row["files"]["a.txt"] else sys.exit(3))
"""


@pytest.mark.parametrize(
    ("command", "reward"), [("cp a.txt b.txt; touch /tmp/left", 0.5), ("ls", 0.0), ("echo other > b.txt", None)]
)
async def test_a_verifier_scores_in_a_box_of_its_own(tokenizer, programs, tmp_path, command, reward):
    verifier = tmp_path / "verify.py"
    verifier.write_text(VERIFIER)
    workflow = workflow_of(tokenizer, programs, verifier=str(verifier))
    engine = Script(tokenizer, command, "done")
    if reward is None:
        with pytest.raises(RewardError, match="ended with exit code 3; 0 is a success and 1 a failure"):
            await run(workflow, engine)
        return
    _, (row,) = await run(workflow, engine)
    assert row.reward == reward


async def test_side_conversations_and_retries_of_a_program(tokenizer, programs):
    agent = {"command": f"{COMMAND} titled twice", "side_conversations": [{"name": "title", "model": "small"}]}
    sample, (row,) = await run(workflow_of(tokenizer, programs, agent), Script(tokenizer, "A copy", "ls", "done"))
    records = sample.recorder.records
    assert [record.metadata.get("side_conversation") for record in records] == ["title", None, None]
    assert int(row.action_mask.sum()) == sum(len(record.output_ids) for record in records[1:])


async def test_a_program_that_never_asks_is_an_error_with_what_it_said(tokenizer, programs):
    with pytest.raises(WorkflowError, match=r"exit code 1 in its box before its first .* It said: no model, no work"):
        await run(workflow_of(tokenizer, programs, f"{COMMAND} silent"), Script(tokenizer))
    agent = CommandAgent(COMMAND.replace("asker", "not-there"), install="npm install not-there")
    with pytest.raises(
        WorkflowError, match=r"npm install not-there, and name its directory.*not-there: not found|No such file"
    ):
        await run(workflow_of(tokenizer, programs, agent), Script(tokenizer))


async def test_a_program_that_runs_out_of_time_is_scored_and_leaves_nothing_running(tokenizer, programs):
    mark = f"sleep 61.{time.time_ns() % 10**9}"

    async def cut(*_, exit_code, **columns):
        return 0.25 if exit_code is None else 0.0

    workflow = workflow_of(tokenizer, programs, reward_fn=cut, timeout=2)
    _, (row,) = await run(workflow, Script(tokenizer, f"setsid {mark} & {mark}", "done"))
    assert row.reward == 0.25
    assert not is_running(mark.split()[1])


def is_running(argument):
    """Whether any process of this machine has an argument."""
    found = False
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found |= argument.encode() in path.read_bytes()
    return found


@pytest.mark.parametrize("manner", ["", " stubborn"])
async def test_a_conversation_that_exceeds_the_context_ends_the_sample_not_the_run(tokenizer, programs, manner):
    engine = Script(tokenizer, "seq 300", "done", context_length=300)
    started = time.monotonic()
    workflow = workflow_of(tokenizer, programs, COMMAND + manner, overflow_seconds=1)
    _, (row,) = await run(workflow, engine)
    assert row.truncated
    assert row.reward == 1.0
    assert time.monotonic() - started < 40


# -- agents ------------------------------------------------------------------------------------------------------------

VALUES = {
    "base_url": "http://h/v1",
    "root_url": "http://h",
    "api_key": "k",
    "model": "m",
    "task": "-v 'x' {home}",
    "home": "/h",
}


def test_placeholders_are_filled_once_and_other_braces_kept():
    agent = CommandAgent(
        command="a --url={base_url} '{task}' '{print $1}'",
        environment={"HOME_OF": "{home}/x"},
        files={"c.json": '{"key": "{api_key}", "models": {"{model}": {}}}'},
    )
    assert agent.command_line(VALUES) == ["a", "--url=http://h/v1", " -v 'x' {home}", "{print $1}"]
    assert agent.variables(VALUES) == {"HOME_OF": "/h/x"}
    assert json.loads(agent.home_files(VALUES)["c.json"]) == {"key": "k", "models": {"m": {}}}


@pytest.mark.parametrize("name", list(COMMAND_AGENTS))
def test_presets_name_their_model_and_task(name):
    agent = COMMAND_AGENTS.get(name)
    line = agent.command_line({**VALUES, "task": "TASK"})
    assert "TASK" in line
    filled = [*line, *agent.variables(VALUES).values(), *agent.home_files(VALUES).values()]
    assert any("http://h" in text for text in filled)
    assert not any(f"{{{name}}}" in text for text in filled for name in VALUES)
    assert agent.install


def test_a_mapping_changes_a_preset():
    agent = CommandAgent.of({"preset": "claude-code", "arguments": "--max-turns 5", "environment": {"A": "1"}})
    base = COMMAND_AGENTS.get("claude-code")
    assert agent.words == [*base.words, "--max-turns", "5"]
    assert agent.environment == {**base.environment, "A": "1"}
    assert agent.side_conversations == base.side_conversations


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("claud-code", "was not found|did you mean"),
        ({"command": "a {task}"}, "nothing tells it where its model is"),
        ({"command": "a {base_url}"}, "nothing tells it its task"),
        ({"command": ""}, "at least one word"),
        ({"command": "a {base_url} {task}", "environment": {"A": 1}}, "values are strings"),
        ({"commands": "a"}, "is no command-line agent; give a preset's name, or a mapping of command"),
        ({"arguments": "--x"}, "give its command, or the preset"),
    ],
)
def test_agents_that_cannot_be_are_refused(given, said):
    with pytest.raises(WorkflowError, match=said):
        CommandAgent.of(given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "neither is set"),
        ({"reward_fn": one, "verifier": __file__}, "both are set"),
        ({"verifier": "/no/such/script"}, "verifier names '/no/such/script'"),
        ({"reward_fn": one, "programs": ["/no/such/place"]}, "programs names '/no/such/place'"),
        ({"reward_fn": one, "limits": {"memory": 1}}, "limits has memory; it may hold memory_bytes"),
        ({"reward_fn": one, "timeout": 0}, "above 0"),
        ({"reward_fn": one, "boxes": 0}, "boxes is 0; it is at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(tokenizer, arguments, said):
    with pytest.raises(ConfigError, match=said):
        CommandAgentWorkflow("mini-swe-agent", tokenizer, **arguments)
