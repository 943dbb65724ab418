"""A run of a small model that is recorded once: two calls and a tool in each sample, a failed attempt, evaluations."""

from __future__ import annotations

from rollwright import durable
from rollwright.config.experiment import GRPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import (
    ClusterConfig,
    EvaluatorConfig,
    MicroBatchSpec,
    OptimizerConfig,
    PPOActorConfig,
    RolloutConfig,
    StatsLoggerConfig,
)
from rollwright.config.tasksets import DatasetConfig
from rollwright.data.tokenizer import load_tokenizer
from rollwright.inference.request import ModelRequest
from rollwright.tracking.metrics import get_tracker
from rollwright.trainers.loops.rl import PPOTrainer

GCONFIG = GenerationHyperparameters(max_new_tokens=6, temperature=0.7)
TASKS = [{"question": f"{number}+{number}="} for number in range(8)]
STEPS = 3
VERDICTS = ["wrong", "nearly", "it's right"]


class Adds:
    """Asks, calls a tool, asks again; the first attempt of one sample fails.

    Args:
        tokenizer: the model's.
        good_until: version of the weights from which on every answer gets 0.
    """

    def __init__(self, tokenizer, good_until=1_000) -> None:
        self.tokenizer = tokenizer
        self.good_until = good_until
        self.failed = False

    async def arun_episode(self, engine, data):
        if data["question"] == "1+1=" and not self.failed:
            self.failed = True
            raise ValueError("the calculator is broken")
        ids = self.tokenizer.encode(data["question"])
        mask = [0] * len(ids)
        for turn in range(2):
            answer = await engine.agenerate(ModelRequest(input_ids=list(ids), gconfig=GCONFIG, rid=f"c{id(ids)}"))
            ids += answer.output_tokens
            mask += [1] * len(answer.output_tokens)
            if turn == 0:
                told = self.tokenizer.encode(self.look_up(data["question"]))
                ids += told
                mask += [0] * len(told)
        reward = float(sum(ids) % 3) if max(answer.output_versions) < self.good_until else 0.0
        get_tracker("rollout").scalar(spoken=len(ids), half=reward / 2)
        get_tracker("rollout").note(verdict=VERDICTS[int(reward)])
        return {"input_ids": ids, "loss_mask": mask, "reward": reward}

    @staticmethod
    @durable("calculator")
    def look_up(question):
        return f"= {question[0]}"


def run_config(root, model, steps=STEPS):
    """Steps of 4 groups of 4 samples, of the model in a directory."""
    return GRPOConfig(
        experiment_name="viewed",
        trial_name="run",
        cluster=ClusterConfig(fileroot=f"{root}/runs"),
        stats_logger=StatsLoggerConfig(display="none"),
        gconfig=GCONFIG.new(n_samples=4),
        actor=PPOActorConfig(path=str(model), optimizer=OptimizerConfig(lr=1e-3), mb_spec=MicroBatchSpec()),
        rollout=RolloutConfig(max_failed_share=1.0),
        evaluator=EvaluatorConfig(every_steps=1, gconfig=GCONFIG),
        train_dataset=DatasetConfig(batch_size=4),
        total_train_steps=steps,
    )


def record_run(root, model, evaluated=TASKS[:2], steps=STEPS, good_until=1_000):
    """Carry out that run; returns its directory."""
    tokenizer, config = load_tokenizer(model), run_config(root, model, steps)
    with PPOTrainer(config, TASKS, evaluated) as trainer:
        trainer.train(workflow=Adds(tokenizer, good_until))
    return root / "runs" / "viewed" / "run"
