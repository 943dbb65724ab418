"""Repairs: broken files are wrong, their repairs are right, the splits share none, and the transcripts are what mini-swe-agent sends."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from parts import Script, sampled
from worlds.repairs import repaired, repairs, repairs_of

from rollwright.data.formats import to_tasks
from rollwright.data.tokenizer import build_bpe_tokenizer
from rollwright.errors import DataError, SandboxError
from rollwright.experience.normaliser import normalise
from rollwright.processes.sandbox import check_sandbox
from rollwright.trainers.loops.supervised import supervised_batch
from rollwright.workflows.command_agent import CommandAgentWorkflow

REPOSITORY = Path(__file__).resolve().parents[3]
AGENTS = REPOSITORY / ".venv-clients-openai2"


def results(text, calls):
    names = {}
    exec(text, names)
    try:
        return [eval(expression, names) for expression, _ in calls]  # noqa: S307
    except NameError:
        return None


def test_every_file_is_broken_and_its_calls_say_so():
    for repair in repairs_of("train", 2000):
        right = "".join(each.text() for each in repair.functions)
        wanted = [value for _, value in repair.calls]
        assert results(right, repair.calls) == wanted
        assert results(repair.text, repair.calls) != wanted


def test_splits_share_no_request():
    splits = [{row["query_id"] for row in repairs(split, 2000)} for split in ("train", "valid", "test")]
    assert [len(each) for each in splits] == [2000] * 3
    assert not splits[0] & splits[1] | splits[0] & splits[2] | splits[1] & splits[2]
    with pytest.raises(DataError, match="split 'test' has"):
        repairs("test", 100_000)


def test_the_scripted_commands_repair_the_file_and_the_score_says_so(tmp_path):
    try:
        check_sandbox("bubblewrap")
    except SandboxError as error:
        pytest.skip(f"bubblewrap does not work here: {error}")

    async def scores(place, row):
        return await repaired("", "", [], [], **{**row, "workdir": place})

    for number, (repair, row) in enumerate(zip(repairs_of("test", 4), repairs("test", 4), strict=True)):
        place = tmp_path / str(number)
        place.mkdir()
        assert asyncio.run(scores(place, row)) == 0.0
        (place / repair.file).write_text(row["files"][repair.file])
        assert subprocess.run(repair.look, shell=True, cwd=place, capture_output=True, text=True).stdout == repair.seen
        assert asyncio.run(scores(place, row)) == 0.0
        subprocess.run(row["answer"], shell=True, cwd=place, check=True, stdout=subprocess.DEVNULL)
        assert asyncio.run(scores(place, row)) == 1.0


def test_transcripts_are_token_for_token_what_the_agent_sends():
    if not (AGENTS / "bin" / "mini").exists():
        pytest.skip("mini-swe-agent is not installed: scripts/make_client_envs.sh")
    settings = yaml.safe_load((REPOSITORY / "examples" / "command_agent.yaml").read_text())["workflow_kwargs"]
    worked = to_tasks(repairs("train", 60, worked=True, hurried=0.0), None, "repairs", "sft")
    texts = [each["content"] for row in worked for each in (*row["messages"], *row["completion"])]
    tokenizer = build_bpe_tokenizer(texts, 400)
    row, worked_row = repairs("train", 60)[0], worked[0]
    engine = Script(tokenizer, *(each["content"] for each in worked_row["completion"] if each["role"] == "assistant"))
    workflow = CommandAgentWorkflow(**{**settings, "programs": [str(AGENTS)]}, tokenizer=tokenizer, reward_fn=repaired)

    async def episode():
        sample = sampled(engine)
        return normalise(await workflow.arun_episode(sample, row), sample.recorder)

    try:
        trained = asyncio.run(episode())
    except SandboxError as error:
        pytest.skip(f"bubblewrap does not work here: {error}")
    finally:
        workflow.front.close()
    scripted = supervised_batch([worked_row], tokenizer)
    for key in ("input_ids", "loss_mask"):
        assert trained[key].long().tolist() == scripted[key].tolist()
    assert trained["rewards"].tolist() == [1.0]
    assert sys.modules.get("minisweagent") is None
