"""An advantage estimator from a file of the user's own, named in YAML and in Python; and advantages that a workflow returns."""

import pytest
import torch

from rollwright import ADVANTAGE_ESTIMATORS, FSDPPPOActor, PPOActorConfig
from rollwright.errors import ConfigError, TrainingError
from rollwright.tracking.metrics_file import read_metrics

ESTIMATOR = '''
import torch

from rollwright import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("ranks")
def ranks(rewards_B, group_ids_B, sample_ids_B, *, step=1.0):
    """The place of each row when the batch is sorted by reward, from 1."""
    return step * (1 + rewards_B.argsort(stable=True).argsort())
'''

WORKFLOW = """
from rollwright import ModelRequest, WORKFLOWS


@WORKFLOWS.register_module("judged_ext")
class Judged:
    def __init__(self, tokenizer, gconfig, **_):
        self.tokenizer, self.gconfig = tokenizer, gconfig.new(n_samples=1)

    async def arun_episode(self, engine, data):
        prompt = self.tokenizer.apply_chat_template(data["messages"], add_generation_prompt=True)
        answer = await engine.agenerate(ModelRequest(input_ids=list(prompt), gconfig=self.gconfig))
        sampled = len(answer.output_tokens)
        return {
            "input_ids": [[*answer.input_tokens, *answer.output_tokens]],
            "loss_mask": [[0] * len(answer.input_tokens) + [1] * sampled],
            "advantages": [[0.0] * len(answer.input_tokens) + [5.0] * sampled],
            "rewards": [0.0],
        }
"""


@pytest.mark.parametrize(
    ("ways", "mean"),
    [
        (["adv_estimator=ranks"], 1.0),
        (["adv_estimator=my_estimators:ranks", "adv_estimator_kwargs={step: 4.0}"], 4.0),
    ],
    ids=["registered", "import path"],
)
def test_a_run_trains_with_it(run_with, user_module, ways, mean):
    folder = user_module("my_estimators", ESTIMATOR)
    plugins = ["--plugin-dir", str(folder)] if len(ways) == 1 else []
    overrides = [f"stages.grpo.actor.{way}" for way in ways]
    run, _ = run_with("", "stages.grpo.gconfig.n_samples=2", *overrides, *plugins)
    found = read_metrics(run / "metrics.jsonl")[0]["actor/advantage/abs_mean"]
    assert mean < found < 4 * mean  # a mean over the tokens of rows that have 1, 2, 3 and 4


def test_advantages_that_a_workflow_returns_are_used(run_with):
    run, _ = run_with(WORKFLOW, "stages.grpo.workflow=judged_ext")
    assert read_metrics(run / "metrics.jsonl")[0]["actor/advantage/abs_mean"] == pytest.approx(5.0)


def actor_with(estimator, **arguments):
    config = PPOActorConfig(adv_estimator=estimator, adv_estimator_kwargs=arguments)
    return FSDPPPOActor(config, torch.nn.Linear(1, 1))


def batch():
    mask = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1]])
    return {
        "input_ids": torch.ones(3, 3, dtype=torch.long),
        "attention_mask": torch.ones(3, 3, dtype=torch.bool),
        "loss_mask": mask,
        "rewards": torch.tensor([0.5, 0.0, 1.0]),
    }


def test_in_python():
    @ADVANTAGE_ESTIMATORS.register("doubled rewards")
    def doubled(rewards_B, group_ids_B, sample_ids_B, *, by=2.0):
        assert group_ids_B.shape == sample_ids_B.shape == rewards_B.shape
        return by * rewards_B

    try:
        advantages = actor_with("doubled rewards", by=3.0).compute_advantages(batch())["advantages"]
        torch.testing.assert_close(advantages, torch.tensor([[0, 1.5, 1.5], [0, 0, 0], [0, 3.0, 3.0]]))
        with pytest.raises(ConfigError, match="buy"):
            actor_with("doubled rewards", buy=3.0).compute_advantages(batch())
    finally:
        del ADVANTAGE_ESTIMATORS["doubled rewards"]


def test_an_estimator_that_returns_something_else_is_named():
    ADVANTAGE_ESTIMATORS["sum"] = lambda rewards_B, group_ids_B, sample_ids_B: rewards_B.sum()
    try:
        with pytest.raises(TrainingError, match=r"'sum' returned \[\[\]\].*\[3\]"):
            actor_with("sum").compute_advantages(batch())
    finally:
        del ADVANTAGE_ESTIMATORS["sum"]


@pytest.mark.parametrize("given", [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 3)])
def test_advantages_of_the_batch_are_used(given):
    advantages = actor_with("normalised").compute_advantages({**batch(), "advantages": given})["advantages"]
    torch.testing.assert_close(advantages, torch.tensor([[0, 1.0, 1.0], [0, 2.0, 0], [0, 3.0, 3.0]]))
    with pytest.raises(TrainingError, match=r"shape \[2\]; give one for each row, \[3\]"):
        actor_with("normalised").compute_advantages({**batch(), "advantages": torch.ones(2)})
