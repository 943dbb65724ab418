"""Environments of verifiers, unmodified: real packages in interpreters of their own, which call the front."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from client_cases import ENVIRONMENTS
from directed_model import CALL, CONTEXT, THOUGHT, Directed, check_record, defaults, small_engine

from rollwright.environments import verifiers_hub
from rollwright.environments.verifiers_hub import EnvironmentSpec, shared_host, spec_and_task, verifiers
from rollwright.errors import DataError, LostToolError, PromptTooLongError, RewardError, WorkflowError
from rollwright.tracking.metrics import get_tracker

pytest.importorskip("llguidance")
PROGRAMS = str(Path(__file__).with_name("programs"))
#: Of processes that are told of a proxy, which is not there: the policy is asked without it.
BEHIND_A_PROXY = {"PYTHONPATH": PROGRAMS, "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}


def python_of(name: str) -> str:
    """The interpreter of an environment that scripts/make_client_envs.sh makes."""
    environment = ENVIRONMENTS / name
    if not list(environment.glob(".complete-*")):
        pytest.skip(f"{environment} is not there or not complete: run scripts/make_client_envs.sh")
    return str(environment / "bin" / "python")


def tasks_of(name: str, environment: str, split: str = "train", **args: Any) -> list[dict[str, Any]]:
    return verifiers(split, name, args, python_of(environment), {"PYTHONPATH": PROGRAMS})


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Any]:
    with small_engine(tmp_path_factory.mktemp("verifiers") / "policy") as engine:
        yield engine


class Player:
    """Plays tasks with one workflow, whose processes it keeps."""

    def __init__(self, engine: Any) -> None:
        from rollwright.workflows.verifiers import VerifiersWorkflow

        class Kept(VerifiersWorkflow):
            async def run_agent(self, episode, data):
                self.episode = episode
                return await super().run_agent(episode, data)

        self.engine, self.workflow, self.loop = engine, Kept(engine.tokenizer, defaults()), asyncio.new_event_loop()
        self.asked: list[Any] = []

    def __call__(self, row: dict[str, Any], *replies: str, timeout: float = 600.0, context: int = CONTEXT) -> list[Any]:
        directed = Directed(self.engine, list(replies))
        directed.context_length = context
        self.workflow.timeout, self.asked = timeout, directed.requests
        return self.loop.run_until_complete(self.workflow.arun_episode(directed, row))

    def text(self, ids: Any) -> str:
        return self.engine.tokenizer.decode(ids, skip_special_tokens=False)

    def check(self, *replies: str) -> list[Any]:
        """Each token of the last episode is recorded as it was sampled, and trained once."""
        return check_record(self.workflow.episode, self.engine, list(replies))


@pytest.fixture(scope="module")
def play(engine) -> Iterator[Player]:
    player = Player(engine)
    yield player
    player.loop.close()


# -- classic environments ------------------------------------------------------------------------------------------------

CLASSIC = ".venv-clients-verifiers3"


@pytest.fixture(scope="module")
def classic() -> list[dict[str, Any]]:
    return verifiers("train", "sums-classic", {}, python_of(CLASSIC), BEHIND_A_PROXY)


def sum_of(rows: list[dict[str, Any]], number: int = 17) -> dict[str, Any]:
    """A row, as if its sum were that of a number."""
    column = rows[0]["verifiers"]
    task = {**column["task"], "answer": str(number + 25), "info": {"number": number}}
    return {**rows[0], "verifiers": {**column, "task": task}}


def test_the_tasks_of_a_classic_environment(classic):
    assert 20 <= len(classic) < 40  # 80 % of them; the others are held out
    numbers = {row["verifiers"]["task"]["info"]["number"] for row in classic}
    assert len(numbers) == len(classic)
    assert numbers < set(range(17, 57))
    row = classic[0]
    assert row["messages"] == [{"role": "user", "content": f"What is {int(row['answer']) - 25} + 25?"}]
    assert row["query_id"].startswith("sums-classic/train/")


def test_an_evaluation_dataset_is_held_out(monkeypatch):
    """And all datasets and workflows share the process of an environment, which ends after the last of them."""
    monkeypatch.setattr(verifiers_hub, "KEPT_SECONDS", 0.1)
    spec = EnvironmentSpec("sums-classic", {"held_out": 3}, python_of(CLASSIC), {"PYTHONPATH": PROGRAMS})
    host = shared_host(spec)
    process = psutil.Process(host._process.pid)
    rows = tasks_of("sums-classic", CLASSIC, "test", held_out=3)
    assert [row["answer"] for row in rows] == ["1025", "1026", "1027"]
    assert len(tasks_of("sums-classic", CLASSIC, held_out=3)) == 40
    assert shared_host(spec) is host
    assert process.is_running()
    del host
    process.wait(30)


def test_a_classic_environment_plays_with_the_policy_and_scores(play, classic):
    get_tracker().export()
    rows = play(sum_of(classic), THOUGHT + CALL, "42")
    figures = get_tracker().export()
    assert figures["rollout/verifiers_right"] == 1.0
    assert figures["rollout/verifiers_inverse"] == pytest.approx(1 / 42)
    assert figures["rollout/verifiers_total_tool_calls"] == 1.0
    assert [row.reward for row in rows] == [2.5]
    assert "<tool_response>\n42\n</tool_response>" in play.text(play.asked[1].input_ids)
    assert play.asked[0].gconfig.temperature == 0.8  # the run's arguments, because the environment sets none
    assert len(play.check(THOUGHT + CALL, "42")) == 1


def test_a_reward_function_that_raises_is_a_failure_and_no_zero(play, classic):
    with pytest.raises(
        RewardError, match=r"its reward function polite raised LookupError: no such word in the book of sum 17, in .*py:"
    ):
        play(sum_of(classic), "You are stupid.")
    assert [row.reward for row in play(sum_of(classic), "wrong")] == [0.5]  # only a metric raised


def test_an_empty_reply_is_the_policys_and_is_scored(play, classic):
    assert [row.reward for row in play(sum_of(classic), "")] == [0.5]  # as any wrong answer
    assert len(play.check("")) == 1


def test_what_does_not_fit_into_the_context_is_scored_and_truncated(play, classic):
    play(sum_of(classic), "42")
    prompt = len(play.asked[0].input_ids)
    rows = play(sum_of(classic), CALL, context=prompt + len(play.engine.tokenizer.encode(CALL)) + 4)
    assert [row.truncated for row in rows] == [True]
    assert rows[0].reward > 0  # of its rubric, which scores what there is
    with pytest.raises(PromptTooLongError):
        play(sum_of(classic), context=prompt - 1)


def test_limits_and_lost_processes_are_no_samples(play, classic):
    with pytest.raises(WorkflowError, match=r"took more than 0.001 s for an episode"):
        play(sum_of(classic), "42", timeout=0.001)
    (host,) = [host for host, _ in play.workflow.hosts._hosts.values()]
    for process in psutil.Process(host._process.pid).children(recursive=True):
        process.kill()
    with pytest.raises(LostToolError, match="the process of the environment sums-classic has ended"):
        play(sum_of(classic), "42")
    assert [row.reward for row in play(sum_of(classic), "42")] == [2.5]  # another process


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("sums-classic", {"group": True}, r"scores whole groups of rollouts \(best\)"),
        ("no-such-environment", {}, "No module named 'no_such_environment'.*kwargs.python"),
    ],
)
def test_environments_that_cannot_be_used(name, args, message):
    with pytest.raises(DataError, match=message):
        tasks_of(name, CLASSIC, **args)


# -- verifiers.v1 --------------------------------------------------------------------------------------------------------

V1 = ".venv-clients-openai2"


@pytest.fixture(scope="module")
def tasks_v1() -> list[dict[str, Any]]:
    return verifiers("train", "sums-v1", {"taskset": {"tasks": 5}}, python_of(V1), BEHIND_A_PROXY)


def test_a_taskset_plays_with_the_policy_and_scores(play, tasks_v1):
    row = tasks_v1[0]
    number = int(row["answer"]) - 25
    question = [{"role": "system", "content": "Answer with a number."}, {"role": "user", "content": f"What is {number} + 25?"}]
    assert row["messages"] == question
    get_tracker().export()
    rows = play(row, row["answer"])
    assert [row.reward for row in rows] == [2.0]
    figures = get_tracker().export()
    assert (figures["rollout/verifiers_right"], figures["rollout/verifiers_length"]) == (1.0, 2.0)
    assert "Answer with a number." in play.text(play.asked[0].input_ids)
    assert play.asked[0].gconfig.temperature == 0.8
    assert len(play.check(row["answer"])) == 1


def test_a_reward_of_a_taskset_that_raises_is_a_failure(play, tasks_v1):
    with pytest.raises(RewardError, match=r"TaskError: task SumTask scoring: LookupError: no such word in the book of sum"):
        play(tasks_v1[0], "You are stupid.")


def test_episodes_of_a_taskset_leave_nothing_open(play, tasks_v1):
    row = tasks_v1[0]
    host = shared_host(spec_and_task(row)[0])

    def open_files() -> int:
        return sum(process.num_fds() for process in psutil.Process(host._process.pid).children(recursive=True))

    play(row, row["answer"])
    before = open_files()
    for _ in range(4):
        play(row, row["answer"])
    assert open_files() <= before
