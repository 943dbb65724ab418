"""Parts of an episode that run at once end together, and the groups that workflows make themselves are whole or none."""

import asyncio

import pytest
import torch

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.experience.contract import check_trajectory
from rollwright.experience.normaliser import normalise
from rollwright.experience.recorder import Recorder
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelResponse
from rollwright.workflows.episode import run_concurrently
from rollwright.workflows.multi_turn import MultiTurnWorkflow
from rollwright.workflows.parallel_generation import ParallelGenerationWorkflow
from rollwright.workflows.rlvr import RLVRWorkflow
from rollwright.workflows.tool_integrated import ToolIntegratedWorkflow

TOKENIZER = build_character_tokenizer()
TASK = {"messages": [{"role": "user", "content": "6*7="}], "answer": "42"}
GROUP_MAKERS = [MultiTurnWorkflow, ParallelGenerationWorkflow, RLVRWorkflow, ToolIntegratedWorkflow]


async def test_results_stand_in_the_order_of_the_parts():
    async def part(number):
        await asyncio.sleep(0.02 / (1 + number))
        return number

    assert await run_concurrently(part(number) for number in range(4)) == [0, 1, 2, 3]


async def test_where_one_fails_the_others_have_ended_when_the_caller_is_told():
    ended = []

    async def fails():
        await asyncio.sleep(0)
        raise RuntimeError("gone")

    async def waits(number):
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)  # an end that takes a while
            ended.append(number)

    with pytest.raises(RuntimeError, match="gone"):
        await run_concurrently([waits(1), fails(), waits(2)])
    assert sorted(ended) == [1, 2]


async def test_a_caller_that_is_cancelled_takes_its_parts_along():
    ended = []

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    task = asyncio.create_task(run_concurrently([waits(), waits()]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True, True]


class Says:
    """Answers every request with the same words; the request of a number fails, or is aborted."""

    def __init__(self, fails_at=None, aborts_at=None):
        self.fails_at, self.aborts_at, self.requests = fails_at, aborts_at, []
        self.running = 0

    async def agenerate(self, request):
        self.requests.append(request)
        number = len(self.requests)
        self.running += 1
        try:
            others = 0.02 if self.fails_at is None else 5.0  # so that none of them gets further before the failure
            await asyncio.sleep(0.01 if number in (self.fails_at, self.aborts_at) else others)
        finally:
            self.running -= 1
        if number == self.fails_at:
            raise RuntimeError("gone")
        ids = [*TOKENIZER.encode("42", add_special_tokens=False), TOKENIZER.eos_token_id]
        reason = "abort" if number == self.aborts_at else "stop"
        return ModelResponse(list(request.input_ids), ids, [-0.5] * 3, [0] * 3, reason, rid=request.rid)


async def full_marks(prompt, completion, prompt_ids, completion_ids, **data):
    return 1.0


@pytest.mark.parametrize("workflow", GROUP_MAKERS)
async def test_a_workflow_that_nobody_repeats_makes_its_group(workflow):
    made = workflow(full_marks, GenerationHyperparameters(n_samples=3, max_new_tokens=8), TOKENIZER)
    engine = Says()
    row = await made.arun_episode(engine, TASK)
    check_trajectory(row)
    assert row["rewards"].tolist() == [1.0] * 3
    assert {request.gconfig.n_samples for request in engine.requests} == {1}
    assert len({request.rid for request in engine.requests}) == 3
    assert await made.arun_episode(Says(aborts_at=2), TASK) is None


@pytest.mark.parametrize("workflow", GROUP_MAKERS)
async def test_a_failing_sample_leaves_nothing_running(workflow):
    made = workflow(full_marks, GenerationHyperparameters(n_samples=3, max_new_tokens=8), TOKENIZER)
    engine = Says(fails_at=2)
    with pytest.raises(RuntimeError, match="gone"):
        await made.arun_episode(engine, TASK)
    assert engine.running == 0
    assert len(engine.requests) == 3


class Keeps(Says, InferenceEngine):
    """The same words, from an engine that keeps a record."""

    def __init__(self):
        super().__init__()
        self.recorder = Recorder()

    async def agenerate(self, request):
        response = await super().agenerate(request)
        self.recorder.record(request, response)
        return response

    def _unused(self, *arguments):
        raise AssertionError("a workflow only asks for completions")

    get_version = set_version = pause = resume = abort = _unused


@pytest.mark.parametrize("workflow", GROUP_MAKERS)
async def test_what_the_record_knows_is_left_to_the_record(workflow):
    made = workflow(full_marks, GenerationHyperparameters(max_new_tokens=8), TOKENIZER)
    engine = Keeps()
    row = await made.arun_episode(engine, TASK)
    assert not {"logprobs", "versions", "temperature", "attention_mask"} & row.keys()
    filled = normalise(row, engine.recorder)
    alone = await made.arun_episode(Says(), TASK)
    assert filled.keys() == alone.keys()
    assert all(torch.equal(filled[key], alone[key]) for key in filled)
