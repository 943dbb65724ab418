"""GRPO in a loop of your own: the calls that `rollwright run` makes, in the open, with the same numbers.

Make a model that gets some sums right, then train it here:

    rollwright run quickstart
    python examples/own_loop.py runs/quickstart/trial/warmup/checkpoints/final
"""

import sys
from collections.abc import Iterator

import torch

from rollwright import (
    DatasetConfig,
    FinetuneSpec,
    FSDPPPOActor,
    GenerationHyperparameters,
    GRPOConfig,
    LocalRolloutEngine,
    PPOActorConfig,
    RLVRWorkflow,
    TaskLoader,
    get_dataset,
    load_tokenizer,
)
from rollwright.config.sections import OptimizerConfig


def settings(model: str, steps: int = 20) -> GRPOConfig:
    """Sums of two digits: 16 tasks a step, 8 samples of each."""
    return GRPOConfig(
        reward_fn="numeric_reward",
        deterministic=True,
        total_train_steps=steps,
        train_dataset=DatasetConfig(path="arithmetic", split="train", batch_size=16),
        gconfig=GenerationHyperparameters(n_samples=8, max_new_tokens=32),
        actor=PPOActorConfig(path=model, optimizer=OptimizerConfig(lr=1.5e-4, warmup_steps_proportion=0.0)),
    )


def train(config: GRPOConfig, save_to: str | None = None) -> Iterator[dict[str, float]]:
    """Train the policy, and yield the metrics of each step."""
    torch.manual_seed(config.seed)
    tokenizer = load_tokenizer(config.actor.path)
    tasks = get_dataset(config.train_dataset, config.actor.path)
    batch_size, samples = config.train_dataset.batch_size, config.gconfig.n_samples
    loader = TaskLoader(tasks, batch_size, seed=config.seed)
    workflow = RLVRWorkflow(config.reward_fn, config.gconfig.new(n_samples=1), tokenizer)

    actor = FSDPPPOActor(config.actor)
    actor.initialize(None, FinetuneSpec(config.total_train_epochs, len(tasks), batch_size, config.total_train_steps))
    engine = {"seed": config.seed, "deterministic": config.deterministic}
    with LocalRolloutEngine(config.rollout, actor.shared_model, tokenizer, **engine) as rollout:
        actor.connect_engine(rollout)
        actor.prove_publication()  # the engine computes with every tensor that will be published
        for _ in range(config.total_train_steps or 0):
            batch = actor.sample(loader, workflow, group_size=samples)
            actor.compute_advantages(batch)
            metrics = actor.forward_backward(batch, "policy")  # or your own function of (rows, logprobs, entropies)
            metrics |= actor.optim_step()
            actor.step_lr_scheduler()
            actor.publish()
            yield {"reward": float(batch["rewards"].double().mean()), **metrics}
        if save_to is not None:
            actor.save(save_to, tokenizer)


if __name__ == "__main__":
    for step, metrics in enumerate(train(settings(sys.argv[1]), save_to="runs/own_loop"), 1):
        print(f"step {step}: reward {metrics['reward']:.3f}, loss {metrics['loss']:.4f}, entropy {metrics['entropy']:.3f}")
