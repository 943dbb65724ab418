"""RLVRWorkflow, apart from any executor: what it asks, how it scores, what it returns."""

import asyncio

import pytest

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import RewardError, WorkflowError
from rollwright.inference.request import ModelResponse
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.rlvr import RLVRWorkflow


class Scripted:
    """An engine that says what it is told to."""

    def __init__(self, tokenizer, text="42", stop_reason="stop"):
        self.requests = []
        self.tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        self.stop_reason = stop_reason

    async def agenerate(self, request):
        self.requests.append(request)
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=list(self.tokens),
            output_logprobs=[-0.25] * len(self.tokens),
            output_versions=[3] * len(self.tokens),
            stop_reason=self.stop_reason,
            rid=request.rid,
        )


TASK = {"messages": [{"role": "user", "content": "6*7="}], "answer": "42", "prompt": "a column that collides"}


def run(workflow, engine, task=TASK):
    return asyncio.run(workflow.arun_episode(engine, task))


async def matches(prompt, completion, prompt_ids, completion_ids, answer, **kwargs):
    assert isinstance(prompt_ids, list)
    assert isinstance(completion_ids, list)
    return float(completion == answer)


def test_the_row_covers_prompt_and_completion(tokenizer):
    engine = Scripted(tokenizer)
    row = run(RLVRWorkflow(matches, GenerationHyperparameters(max_new_tokens=8, temperature=0.7), tokenizer), engine)
    request = engine.requests[0]
    expected = tokenizer.apply_chat_template(TASK["messages"], tokenize=True, add_generation_prompt=True)
    assert request.input_ids == list(expected)
    assert request.gconfig.temperature == 0.7
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id} <= set(request.gconfig.stop_token_ids)
    prompt, completion = len(request.input_ids), 3
    assert row["input_ids"].tolist() == [request.input_ids + engine.tokens]
    assert row["loss_mask"].tolist() == [[0] * prompt + [1] * completion]
    assert row["logprobs"].tolist() == [[0.0] * prompt + [-0.25] * completion]
    assert row["versions"].tolist() == [[-1] * prompt + [3] * completion]
    assert row["rewards"].tolist() == [1.0]  # special tokens are left out of the text that is scored


def test_the_prompt_can_be_made_by_the_users_functions(tokenizer):
    engine = Scripted(tokenizer)
    workflow = RLVRWorkflow(
        matches,
        GenerationHyperparameters(),
        tokenizer,
        data_extract_prompt_fn=lambda data: data["question"],
        get_input_ids_fn=lambda prompt, tokenizer, enable_thinking: tokenizer.encode(f"Q:{prompt}", add_special_tokens=False),
    )
    run(workflow, engine, {"question": "x", "answer": "42"})
    assert tokenizer.decode(engine.requests[0].input_ids) == "Q:x"
    by_path = RLVRWorkflow(
        "exact_match_reward",
        GenerationHyperparameters(),
        tokenizer,
        get_input_ids_fn="rollwright.workflows.episode.chat_input_ids",
        data_extract_prompt_fn="rollwright.workflows.episode.extract_messages",
    )
    assert run(by_path, Scripted(tokenizer))["rewards"].tolist() == [1.0]


def test_a_task_without_messages_says_what_it_has(tokenizer):
    workflow = RLVRWorkflow(matches, GenerationHyperparameters(), tokenizer)
    with pytest.raises(WorkflowError, match=r"no column 'messages' \(it has answer, question\).*data_extract_prompt_fn"):
        run(workflow, Scripted(tokenizer), {"question": "x", "answer": "42"})


def test_arguments_from_yaml_are_taken_and_wrong_ones_refused(tokenizer):
    workflow = RLVRWorkflow("exact_match_reward", {"max_tokens": 5, "temperature": 0.5}, tokenizer)
    assert (workflow.gconfig.max_new_tokens, workflow.gconfig.temperature) == (5, 0.5)
    with pytest.raises(RewardError):
        RLVRWorkflow("no_such_reward", GenerationHyperparameters(), tokenizer)
    with pytest.raises(WorkflowError, match=r"get_input_ids_fn: function 'nowhere\.fn' was not found"):
        RLVRWorkflow(matches, GenerationHyperparameters(), tokenizer, get_input_ids_fn="nowhere.fn")


def test_n_samples_asks_that_often_with_conversations_of_their_own(tokenizer):
    engine = Scripted(tokenizer)
    rows = run(RLVRWorkflow(matches, GenerationHyperparameters(n_samples=3), tokenizer), engine)
    assert rows["input_ids"].shape[0] == 3
    assert len({request.rid for request in engine.requests}) == 3
    assert all(request.gconfig.n_samples == 1 for request in engine.requests)


def test_an_aborted_request_rejects_the_sample(tokenizer):
    assert run(RLVRWorkflow(matches, GenerationHyperparameters(), tokenizer), Scripted(tokenizer, stop_reason="abort")) is None


def test_statistics_are_reported_in_the_scope(tokenizer):
    workflow = RLVRWorkflow(matches, GenerationHyperparameters(), tokenizer, rollout_stat_scope="test_rlvr_scope")
    run(workflow, Scripted(tokenizer))
    run(workflow, Scripted(tokenizer, text="wrong", stop_reason="length"))
    metrics = get_tracker("test_rlvr_scope").export(reset=True)
    assert list(metrics) == ["test_rlvr_scope/prompt_tokens"]  # reward, length and truncation are counted for every workflow
