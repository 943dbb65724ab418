"""The schedule and the parameter groups."""

import copy
import math

import pytest
import torch
from tiny_policy import tiny_actor, tiny_batch, tiny_model

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import OptimizerConfig
from rollwright.errors import ConfigError
from rollwright.training.optimizer_and_schedule import (
    learning_rate_factor,
    load_optimizer_state,
    make_optimizer,
    make_scheduler,
    optimizer_state,
)
from rollwright.training.recovery_checkpoint import RecoverCheckpoints, read_state, write_state


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1] + [0.1 + 0.9 * (1 - step / 8) for step in range(9)]),
        ("cosine", [0.5, 1] + [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(9)]),
    ],
)
def test_schedules(kind, expected):
    config = OptimizerConfig(lr_scheduler_type=kind, warmup_steps_proportion=0.2, min_lr_ratio=0.1)
    assert [learning_rate_factor(step, config, 10) for step in range(11)] == pytest.approx(expected)


def test_the_rate_stays_at_its_end_after_the_last_step():
    config = OptimizerConfig(lr_scheduler_type="linear")
    assert learning_rate_factor(50, config, 10) == 0.0


def test_norms_and_biases_do_not_decay():
    model = tiny_model("qwen2")
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        plain = name.endswith("norm.weight") or name.endswith("bias") or "layernorm" in name
        assert decays[id(parameter)] == (0.0 if plain else 0.3), name


def test_a_schedule_needs_the_length_of_the_run():
    optimizer = make_optimizer(tiny_model(), OptimizerConfig())
    with pytest.raises(ConfigError, match="FinetuneSpec"):
        make_scheduler(optimizer, OptimizerConfig(warmup_steps_proportion=0.1), None)
    make_scheduler(optimizer, OptimizerConfig(), None)
    scheduler = make_scheduler(optimizer, OptimizerConfig(lr=1.0, warmup_steps_proportion=0.1), FinetuneSpec(1, 100, 10))
    assert scheduler.get_last_lr()[0] == pytest.approx(1e-5)


def trained(actor, steps, start=0):
    for step in range(start, start + steps):
        actor.ppo_update(actor.compute_advantages(tiny_batch(seed=step)))
        actor.step_lr_scheduler()
    return torch.cat([parameter.detach().flatten() for parameter in actor.model.parameters()])


def test_another_optimizer_is_found_by_its_path_and_resumes(tmp_path):
    """SGD with momentum: its state has other names, and none before the first step."""
    keys = {"dtype": torch.float32, "optimizer": OptimizerConfig(kind="torch.optim:SGD", lr=0.1, kwargs={"momentum": 0.9})}
    first = tiny_actor(**keys)
    trained(first, 2)
    RecoverCheckpoints(tmp_path).save(2, {"actor": first.state_dict()})
    expected = trained(first, 2, start=2)
    second = tiny_actor(**keys)
    second.load_state_dict(RecoverCheckpoints(tmp_path).load()[1]["actor"])
    assert torch.equal(trained(second, 2, start=2), expected)


def test_arguments_that_an_optimizer_does_not_take_are_named():
    with pytest.raises(ConfigError, match=r"optimizer\.kind=adamw does not take.*correct optimizer\.kwargs"):
        make_optimizer(tiny_model(), OptimizerConfig(kwargs={"momentum": 0.9}))
    with pytest.raises(ConfigError, match="nowhere"):
        make_optimizer(tiny_model(), OptimizerConfig(kind="nowhere"))


class Plain(torch.nn.Module):
    """A matrix that is large enough for moments of few bits, and one that is not."""

    def __init__(self):
        super().__init__()
        self.large, self.small = torch.nn.Parameter(torch.randn(64, 64)), torch.nn.Parameter(torch.randn(5))


@pytest.mark.parametrize("kind", ["adamw_8bit", "adamw_4bit"])
def test_moments_of_few_bits_are_kept_and_resume_as_they_were(tmp_path, kind, monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # its C++ compiler takes minutes
    torch.manual_seed(1)
    model, config = Plain(), OptimizerConfig(kind=kind, lr=0.01)

    def step(model, optimizer, number):
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    def make(model):
        optimizer = make_optimizer(model, config)
        return optimizer, make_scheduler(optimizer, config, None)

    optimizer, scheduler = make(model)
    whole = copy.deepcopy(model)
    exact = make_optimizer(whole, OptimizerConfig(lr=0.01))
    for number in range(3):
        step(model, optimizer, number)
        step(whole, exact, number)
    assert float((model.large - whole.large).abs().mean()) < 3e-3  # of three steps of 0.01
    assert type(optimizer.state[model.large]["exp_avg"]).__name__ == f"OptimState{kind[6:]}"
    other = Plain()
    other.load_state_dict(model.state_dict())
    write_state(tmp_path / "s", optimizer_state(model, optimizer, scheduler))
    resumed, its_scheduler = make(other)
    load_optimizer_state(other, resumed, its_scheduler, read_state(tmp_path / "s"))
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, resumed, number)
    assert float((other.large - model.large).abs().max()) < (2e-3 if kind == "adamw_8bit" else 2e-2)  # rounded once more
