"""An instance of a workflow is evaluated with the evaluation's arguments, and ends its turns where it always does."""

import torch

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.trainers.loops.evaluation import evaluate
from rollwright.workflows.search_agent import SearchAgentWorkflow


class Rollout:
    """Gives every task one row, and keeps the workflow that it was given."""

    def __init__(self, reward=1.0):
        self.reward = reward

    def rollout_batch(self, tasks, workflow, **arguments):
        self.workflow = workflow
        count = len(tasks)
        return {
            "rewards": torch.full((count,), self.reward),
            "truncated": torch.zeros(count, dtype=torch.bool),
            "loss_mask": torch.ones(count, 2),
            "group_ids": torch.arange(count),
            "sample_ids": torch.arange(count),
        }


def test_an_instance_keeps_what_ends_its_turns():
    tokenizer = build_character_tokenizer()
    given = GenerationHyperparameters(temperature=0.7, stop=["\n\n"], n_samples=4)
    workflow = SearchAgentWorkflow(given, tokenizer, search_tool=None)
    rollout = Rollout()
    arguments = GenerationHyperparameters(greedy=True, max_new_tokens=5, stop=["x"])
    assert evaluate(rollout, [{}, {}], workflow, None, arguments).reward == 1.0
    used = rollout.workflow.gconfig
    assert (used.greedy, used.max_new_tokens, used.n_samples) == (True, 5, 1)
    assert used.stop == ["\n\n", "</search>", "</answer>", "x"]
    assert set(used.stop_token_ids) == {tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert workflow.gconfig.temperature == 0.7


def test_a_workflow_with_no_stops_gets_the_evaluation_s_arguments_alone():
    class Own:
        gconfig = None

        async def arun_episode(self, engine, data): ...

    rollout = Rollout()
    evaluate(rollout, [{}], Own(), None, GenerationHyperparameters(greedy=True))
    assert rollout.workflow.gconfig == GenerationHyperparameters(greedy=True)
