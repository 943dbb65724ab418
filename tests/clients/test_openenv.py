"""Environments of OpenEnv: a real server of its package, played by ``environment_workflow`` over its WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_cases import ENVIRONMENTS
from parts import JournalledEpisodes, Script, played
from quiet_ports import quiet_ports

from rollwright.config.tasksets import TasksetConfig
from rollwright.data.tokenizer import build_word_tokenizer
from rollwright.environments.openenv import OpenEnv, OpenEnvRefusal, OpenEnvSession, websocket_url
from rollwright.errors import ConfigError, LostToolError, WorkflowError

SERVER = Path(__file__).with_name("programs") / "guessing_server.py"
NUMBERS = [str(number) for number in range(1, 21)]
TOKENIZER = build_word_tokenizer([*NUMBERS, "-", "higher", "lower", "right", "fail", "end", "forget", "wait"])
SESSIONS = 2
SEED, NUMBER = 5, 20  # the number of a game with this seed


@contextlib.contextmanager
def served(sessions: int = SESSIONS) -> Iterator[str]:
    """The address of a server; its imports take 8 seconds of a processor."""
    environment = ENVIRONMENTS / ".venv-clients-openenv"
    if not list(environment.glob(".complete-*")):
        pytest.skip(f"{environment} is not there or not complete: run scripts/make_client_envs.sh")
    (port,) = quiet_ports(1)
    command = [environment / "bin" / "python", SERVER, str(port), str(sessions)]
    process = subprocess.Popen(command, env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served() as url:
        yield url


def play(url, *replies, engine=None, **arguments):
    """One episode; returns its experiences, its rows and the prompts."""
    engine = engine or Script(TOKENIZER, *replies)
    workflow_args = {"environment": "openenv", "environment_args": {"url": url, **arguments}, "max_turns": len(replies)}
    taskset = TasksetConfig(workflow="environment_workflow", workflow_args=workflow_args)

    experiences, rows = asyncio.run(played(taskset, {"seed": SEED}, engine, TOKENIZER))
    return experiences, rows, [TOKENIZER.decode(request.input_ids) for request in engine.requests]


def test_an_episode_is_one_row_and_the_replies_are_the_actions(address):
    [experience], rows, prompts = play(address, "10", "15", "20")
    assert prompts[0] == "<|user|>1-20<|end|><|assistant|>"
    assert prompts[2] == f"{prompts[0]}10<|end|><|user|>higher<|end|><|assistant|>15<|end|><|user|>higher<|end|><|assistant|>"
    assert experience.reward == pytest.approx(1.0 - 0.1)  # the first guess has no reward of its own
    assert experience.metrics == {"turns": 3, "invalid_actions": 0, "finished": 1.0}
    trained = rows["loss_mask"][0].bool()
    assert TOKENIZER.decode(rows["input_ids"][0][trained], skip_special_tokens=True) == "101520"


def test_reset_takes_the_seed_and_further_arguments(address):
    _, _, prompts = play(address, "10", reset={"largest": 10})
    assert prompts[0] == "<|user|>1-10<|end|><|assistant|>"


def test_functions_convert_replies_and_observations_and_say_what_is_invalid(address):
    def action(reply, environment):
        if reply == "wait":
            raise ValueError("higher - lower")
        assert environment.shown["guesses"] == 0
        return {"message": reply}

    def observation(shown, environment):
        return str(shown["guesses"] + 1)

    [experience], _, prompts = play(address, "wait", "20", action=action, observation=observation)
    assert prompts[0] == "<|user|>1<|end|><|assistant|>"
    assert prompts[1].endswith("wait<|end|><|user|>higher - lower\n1<|end|><|assistant|>")
    assert experience.metrics == {"turns": 2, "invalid_actions": 1, "finished": 1.0}
    assert experience.reward == 1.0


def test_a_refusal_fails_the_sample_or_is_told_to_the_model(address):
    with pytest.raises(OpenEnvRefusal, match="answered 'step' with EXECUTION_ERROR: the dice fell off the table"):
        play(address, "fail")
    [experience], _, prompts = play(address, "fail", "20", on_refusal="tell")
    assert "the dice fell off the table" in prompts[1]
    assert experience.metrics["invalid_actions"] == 1
    with pytest.raises(OpenEnvRefusal, match=r"VALIDATION_ERROR: Invalid message .message: Field required; text: Extra inputs"):
        play(address, "10", action="text")


def test_an_episode_that_ends_without_a_reward_is_an_error(address):
    with pytest.raises(WorkflowError, match="ended the episode without a reward"):
        play(address, "forget")


async def test_episodes_wait_for_a_free_session(address):
    async def game():
        environment = OpenEnv(SEED, url=address)
        try:
            shown = await environment.observation()
            return shown, await environment.step(str(NUMBER))
        finally:
            await environment.close()

    games = await asyncio.gather(*(game() for _ in range(3 * SESSIONS)))
    assert {(shown, result.observation, result.reward) for shown, result in games} == {("1-20", "right", 1.0)}
    async with OpenEnvSession(address) as first, OpenEnvSession(address) as second:
        await first.send("reset", {})
        assert (await second.send("state"))["step_count"] == 0
        async with OpenEnvSession(address, wait=0.2) as third:
            with pytest.raises(LostToolError, match=r"CAPACITY_REACHED: Server at capacity: 2/2.*within 0.2 s"):
                await third.send("reset", {})


async def test_a_replay_needs_no_server(address, tmp_path):
    async def run():
        environment = OpenEnv(SEED, url=address, on_refusal="tell")
        try:
            shown = [await environment.observation()]
            shown += [await environment.step(reply) for reply in ("10", "fail", "20")]
            return shown, environment.session._socket is not None
        finally:
            await environment.close()

    journalled = JournalledEpisodes(tmp_path)
    played, was_connected = await journalled.first(run)
    assert was_connected
    assert await journalled.again(run) == (played, False)


def test_settings_that_mean_nothing():
    assert websocket_url("https://host/envs/a/") == "wss://host/envs/a/ws"
    assert websocket_url("localhost:8000") == "ws://localhost:8000/ws"
    with pytest.raises(ConfigError, match="no address of an OpenEnv server"):
        websocket_url("ftp://host")
    with pytest.raises(ConfigError, match="on_refusal is 'ignore'; choose fail or tell"):
        OpenEnv(1, url="localhost:1", on_refusal="ignore")
    with pytest.raises(ConfigError, match=r"no\.such"):
        OpenEnv(1, url="localhost:1", action="no.such.function")


async def test_a_slow_answer_is_no_sample(address):
    async with OpenEnvSession(address, timeout=0.5) as session:
        await session.send("reset", {})
        with pytest.raises(LostToolError, match=r"did not answer 'step' within 0.5 s"):
            await session.send("step", {"message": "wait"})
        with pytest.raises(OpenEnvRefusal, match="EXECUTION_ERROR"):  # another environment, which was not reset
            await session.send("step", {"message": "10"})


async def test_a_lost_server_is_no_sample(address):
    """The last test of this file, because the server ends."""
    async with OpenEnvSession(address) as session:
        await session.send("reset", {})
        with pytest.raises(LostToolError, match="ended the connection instead of answering 'step'"):
            await session.send("step", {"message": "end"})
    async with OpenEnvSession(address) as session:
        with pytest.raises(LostToolError, match="cannot be reached"):
            await session.send("reset", {})
