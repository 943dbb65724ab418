"""Episodes on task folders in real boxes: what the agent and the tests see, and what is graded."""

import asyncio
import dataclasses
import json
import re

import pytest
from folders import TEST, read, write
from test_task_files import terminal_bench

from rollwright.environments.harbor import task_box
from rollwright.environments.harbor.folder import HarborOptions
from rollwright.environments.harbor.proof import prove
from rollwright.environments.harbor.score import combined, falls_short, rewards_of
from rollwright.environments.harbor.task_box import TaskBox, until_healthy
from rollwright.environments.harbor.task_file import Healthcheck
from rollwright.environments.harbor.tasks import read_task_folder
from rollwright.errors import SandboxError, VerifierError
from rollwright.experience.durable import EPISODE
from rollwright.experience.journal.episodes import read_episodes
from rollwright.experience.journal.writing import EpisodeWriter, Journal
from rollwright.processes.box import ExecResult


def played(folder, *commands):
    """Give each step one shell command in place of an agent; return the task box after it, and the results."""

    async def play():
        results = []
        async with TaskBox(folder, "bubblewrap") as task:
            async for attempt in task.steps():
                number = folder.steps.index(attempt.step)
                if number < len(commands):
                    results.append(await task.run(["sh", "-c", commands[number]], timeout=attempt.seconds))
        return task, results

    return asyncio.run(play())


def graded(folder, *commands):
    return played(folder, *commands)[0].reward


def test_the_agent_sees_the_task_but_neither_tests_nor_solution(tmp_path):
    folder = read(tmp_path / "task", {"environment/data/words.txt": "one two", "tests/secret": "s"})
    _, (seen,) = played(folder, "pwd; cat data/words.txt; ls -A /tests /solution; ls -A")
    assert seen.stdout == "/app\none two/solution:\n\n/tests:\ndata\n"


def test_settings_of_the_box_reach_agent_and_tests(tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "t")
    monkeypatch.delenv("ANOTHER", raising=False)
    toml = """
[environment]
workdir = "/srv/work"
env = {PLAIN = "p", TOKEN = "${A_TOKEN}", OTHER = "${ANOTHER:-o}", HOST = "${HOME:-closed}"}
[verifier]
env = {GRADER = "g"}
"""
    dockerfile = "FROM scratch\nENV FILES=f\nCOPY words.txt /data/\n"
    test = '#!/bin/sh\necho "$(pwd) $PLAIN $TOKEN $OTHER $HOST $FILES $GRADER $(cat /data/words.txt)" > /logs/verifier/note\n'
    test += 'grep -qx "/srv/work p t o closed f g changed" /logs/verifier/note && echo 1 > /logs/verifier/reward.txt\n'
    files = {"environment/Dockerfile": dockerfile, "environment/words.txt": "words", "tests/test.sh": test}
    folder = read(tmp_path / "task", files, toml, host_env=["A_TOKEN"])
    task, (seen,) = played(folder, "echo $PLAIN $TOKEN $FILES $GRADER $(cat /data/words.txt); echo changed > /data/words.txt")
    assert seen.stdout == "p t f words\n"
    assert task.reward == 1.0


def test_files_that_the_agent_removed_stay_removed(tmp_path):
    test = "#!/bin/sh\nif [ -e old.txt ]; then echo 0; else echo 1; fi > /logs/verifier/reward.txt\n"
    folder = read(tmp_path / "task", {"environment/old.txt": "old", "tests/test.sh": test})
    assert graded(folder, "rm old.txt") == 1.0
    assert graded(folder) == 0.0


def test_a_link_that_leads_out_is_graded_inside_the_jail(tmp_path):
    folder = read(tmp_path / "task")
    assert graded(folder, "ln -s /etc/passwd answer.txt; ln -s / root; ln -s /usr/bin/python3 python") == 0.0


def test_what_the_agent_puts_into_its_box_does_not_reach_the_tests(tmp_path):
    """Tests run in a box of their own: no file outside of the working directory, and no process, comes along."""
    cheat = (
        "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json;"
        "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh; chmod +x /tests/test.sh; touch /tests/helper;"
        "echo 'alias cat=\"echo done\"' > ~/.profile; cp ~/.profile ~/.bashrc;"
        "(while true; do echo 1 > /logs/verifier/reward.txt; done) >/dev/null 2>&1 &"
    )
    test = TEST + "[ -e /tests/helper ] && echo 1 > /logs/verifier/reward.txt\n"
    folder = read(tmp_path / "task", {"tests/test.sh": test})
    assert graded(folder, cheat) == 0.0


@pytest.mark.parametrize("mode", ["task", "taskset"])
def test_tests_run_in_the_agents_box_where_that_is_asked_for(mode, tmp_path):
    test = "#!/bin/sh\n[ -e /tests/helper ] || cp /tmp/left /logs/verifier/reward.txt\n"
    toml = '[verifier]\nenvironment_mode = "shared"\n' if mode == "task" else ""
    folder = read(tmp_path / "task", {"tests/test.sh": test}, toml, verifier="separate" if mode == "task" else "shared")
    assert graded(folder, "echo 0.25 > /tmp/left; touch /tests/helper") == 0.25


def test_a_verifier_that_the_task_separates_gets_only_artifacts(tmp_path):
    toml = """
artifacts = ["/app/out", {source = "notes", exclude = ["*.tmp"]}, "/app/missing"]
[verifier]
environment_mode = "separate"
[[verifier.collect]]
command = "cp answer.txt /logs/artifacts/collected"
"""
    test = "#!/bin/sh\nfind /app /logs/artifacts -type f | sort > /logs/verifier/found\n"
    test += "printf '/app/notes/a\\n/app/out/b\\n/logs/artifacts/collected\\n' | cmp - /logs/verifier/found && echo 1 > /logs/verifier/reward.txt\n"
    folder = read(tmp_path / "task", {"tests/test.sh": test}, toml)
    assert graded(folder, "mkdir out notes /logs/artifacts; touch answer.txt out/b notes/a notes/c.tmp") == 1.0


def test_an_environment_of_the_verifiers_own(tmp_path):
    toml = '[verifier.environment]\nenv = {OWN = "1"}\n[environment]\nenv = {OWN = "0"}\n'
    test = "#!/bin/sh\necho $OWN > /logs/verifier/reward.txt\n"
    assert graded(read(tmp_path / "task", {"tests/test.sh": test}, toml)) == 1.0


def test_the_health_check_is_waited_for(tmp_path):
    toml = '[environment.healthcheck]\ncommand = "echo . >> tries; [ $(wc -l < tries) -ge 3 ]"\ninterval_sec = 0\nretries = 3\n'
    test = "#!/bin/sh\nwc -l < tries > /logs/verifier/reward.txt\n"
    assert graded(read(tmp_path / "good", {"tests/test.sh": test}, toml)) == 3.0
    with pytest.raises(SandboxError, match="failed 2 times"):
        graded(read(tmp_path / "bad", {}, toml.replace("retries = 3", "retries = 2")))


@pytest.mark.parametrize(("grace", "tries"), [(0, 1), (60, 3)])
def test_failures_while_it_starts_do_not_count(grace, tries):
    class Slow:
        tries = 0

        async def exec(self, command, timeout):
            self.tries += 1
            return ExecResult("", "not yet", 0 if self.tries == 3 else 1, 0.0)

    box, check = Slow(), Healthcheck(command="x", retries=1, start_period_sec=grace, start_interval_sec=0)
    if grace:
        asyncio.run(until_healthy(box, check, "task"))
    else:
        with pytest.raises(SandboxError, match="failed 1 times: not yet"):
            asyncio.run(until_healthy(box, check, "task"))
    assert box.tries == tries


# -- steps -----------------------------------------------------------------------------------------------------------


def steps(toml, rewards, **files):
    """Files of a task whose step NAME scores what ``/app/NAME`` holds, else ``rewards[NAME]``."""
    made = {}
    for name, reward in rewards.items():
        made[f"steps/{name}/instruction.md"] = f"Do {name}."
        made[f"steps/{name}/tests/test.sh"] = (
            f"#!/bin/sh\ncp /tests/shared /logs/verifier/; (cat {name} 2>/dev/null || echo '{json.dumps(reward)}')"
            " > /logs/verifier/reward.json\n"
        )
        toml += f'[[steps]]\nname = "{name}"\n' + files.pop(f"toml_{name}", "")
    return {"task.toml": toml, "instruction.md": None, "tests/shared": "s", "tests/test.sh": None, **made, **files}


TWO = {"one": {"reward": 1.0}, "two": {"reward": 0.0, "style": 1.0}}


def test_steps_share_the_box_and_are_graded_each(tmp_path):
    files = steps(
        "", TWO, **{"steps/two/workdir/setup.sh": "cat made > seen; echo ready >> seen\n", "steps/two/workdir/new": "n"}
    )
    folder = read(tmp_path / "task", files)
    task, (_, second) = played(folder, "echo by-one > made", "cat seen new")
    assert second.stdout == "by-one\nready\nn"
    assert task.rewards == [{"reward": 1.0}, {"reward": 0.0, "style": 1.0}]
    assert task.all_rewards == {"reward": 0.5, "style": 0.5}
    task.folder = dataclasses.replace(folder, strategy="final")
    assert task.reward == 0.0


def test_a_step_that_falls_short_ends_the_task(tmp_path):
    folder = read(tmp_path / "task", steps("", TWO, toml_one="min_reward = 1.5\n"))
    assert len(played(folder)[0].rewards) == 1


@pytest.mark.parametrize(
    ("least", "falls"),
    [
        ({}, False),
        ({"reward": 1.0}, False),
        ({"reward": 1.1}, True),
        ({"style": 0.0}, True),
        ({"reward": 0.5, "style": 0.5}, True),
    ],
)
def test_falling_short_is_a_reward_below_its_threshold_or_missing(least, falls):
    assert falls_short({"reward": 1.0}, least) is falls


def test_a_setup_that_fails_is_no_sample(tmp_path):
    folder = read(tmp_path / "task", steps("", TWO, **{"steps/one/workdir/setup.sh": "echo broken >&2; exit 3\n"}))
    with pytest.raises(SandboxError, match=r"setup\.sh failed: broken"):
        played(folder)


# -- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("json_text", "plain", "rewards"),
    [
        ('{"reward": 1, "style": 0.5, "note": "x", "flag": true}', None, {"reward": 1.0, "style": 0.5}),
        ('{"reward": 0.5}', "1", {"reward": 0.5}),
        ('{"style": 0.5}', "1", {"style": 0.5, "reward": 1.0}),
        (None, " 0.25\n", {"reward": 0.25}),
    ],
)
def test_rewards_are_read(json_text, plain, rewards):
    assert rewards_of(json_text, plain) == rewards


@pytest.mark.parametrize(
    ("json_text", "plain", "words"),
    [
        (None, None, "neither"),
        (None, "", "must hold a number"),
        (None, "nan", "no finite number"),
        ('{"reward": NaN}', None, "no finite number"),
        ('{"reward": 1e999}', "1", "no finite number"),
        ("[1]", None, "object of names"),
        ("", "1", "not JSON"),
    ],
)
def test_no_usable_reward_is_an_error(json_text, plain, words):
    with pytest.raises(VerifierError, match=words):
        rewards_of(json_text, plain)


def test_combined_rewards():
    assert combined([{"a": 1.0}, {"a": 0.0, "b": 1.0}], "mean") == {"a": 0.5, "b": 0.5}
    assert combined([{"a": 1.0}, {"a": 0.0, "b": 1.0}], "final") == {"a": 0.0, "b": 1.0}


def test_tests_without_a_reward_tell_what_they_said(tmp_path):
    folder = read(tmp_path / "task", {"tests/test.sh": "#!/bin/sh\necho no network here; exit 7\n"})
    with pytest.raises(VerifierError, match=r"task: the tests wrote neither .* exit code 7 and said: no network here"):
        graded(folder)


def test_tests_that_take_too_long_are_no_score(tmp_path):
    folder = read(tmp_path / "task", {"tests/test.sh": "#!/bin/sh\nsleep 60\n"}, "[verifier]\ntimeout_sec = 0.5\n")
    with pytest.raises(VerifierError, match="ended by a limit"):
        graded(folder)


def test_a_reward_of_another_name(tmp_path):
    test = "#!/bin/sh\necho '{\"score\": 0.75}' > /logs/verifier/reward.json\n"
    path = write(tmp_path / "task", {"tests/test.sh": test})
    assert graded(read_task_folder(path, HarborOptions(reward_key="score"))) == 0.75


def test_an_agent_that_ran_out_of_time_is_graded(tmp_path):
    folder = read(tmp_path / "task", toml="[agent]\ntimeout_sec = 0.5\n")
    task, (result,) = played(folder, "echo done > answer.txt; sleep 60")
    assert result.exit_code is None
    assert task.reward == 1.0


def test_outside_of_steps_there_is_no_box_and_no_reward(tmp_path):
    task = TaskBox(read(tmp_path / "task"), "bubblewrap")
    with pytest.raises(SandboxError, match="only within a step"):
        _ = task.box
    task.rewards.append({"score": 1.0})
    with pytest.raises(VerifierError, match=r"no reward 'reward'; they wrote score"):
        _ = task.reward


# -- proofs ----------------------------------------------------------------------------------------------------------

TASKS = {
    "no solution": ({"solution/solve.sh": None}, r"solution: .* has no solve\.sh"),
    "wrong solution": (
        {"solution/solve.sh": "#!/bin/sh\necho almost > answer.txt\n"},
        "the reference solution scores 0, not 1",
    ),
    "free": ({"tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"}, "doing nothing scores 1, as much as"),
    "no score for nothing": (
        {"tests/test.sh": "#!/bin/sh\n" + "[ -e answer.txt ] || exit\n" + TEST},
        "doing nothing: .*neither",
    ),
    "refused": ({"task.toml": "[environment]\ngpus = 1\n"}, r"refused: .*task\.toml:2"),
}


@pytest.mark.parametrize("name", TASKS)
def test_what_is_wrong_with_a_task_is_named(name, tmp_path):
    files, words = TASKS[name]
    proof = asyncio.run(prove(write(tmp_path / "task", files), HarborOptions(), "bubblewrap"))
    assert re.search(words, proof.fault), proof.fault


def test_a_terminal_bench_task_is_proven(tmp_path):
    path = terminal_bench(tmp_path / "task")
    (path / "tests").mkdir()
    proof = asyncio.run(prove(path, HarborOptions(), "bubblewrap"))
    assert (proof.solved, proof.idle, proof.fault) == (1.0, 0.0, "")


# -- replays ---------------------------------------------------------------------------------------------------------


def test_a_replay_answers_commands_and_scores_without_a_box(tmp_path, monkeypatch):
    folder = read(tmp_path / "task", {"environment/hint": "h"})

    async def episode():
        async with TaskBox(folder, "bubblewrap") as task:
            async for attempt in task.steps():
                seen = await task.run(["sh", "-c", "cat hint; date +%N; echo done > answer.txt"], timeout=attempt.seconds)
        return seen, task.reward, task.all_rewards

    async def as_episode(writer):
        EPISODE.set(writer)
        return await episode()

    journal = Journal(tmp_path / "journal")
    writer = EpisodeWriter(journal)
    facts = {"attempt": 0, "is_eval": False, "version": 0, "workflow": "W", "samples_asked": 1}
    writer.begin(ordinal=0, index=0, task=b"\x80", task_error="", **facts)
    first = asyncio.run(as_episode(writer))
    writer.end("accepted")
    journal.close()
    (past,) = read_episodes(tmp_path / "journal")
    monkeypatch.setattr(task_box, "make_box", lambda *_: pytest.fail("a replay started a box"))
    assert asyncio.run(as_episode(EpisodeWriter(None, past))) == first
    assert first[1] == 1.0
