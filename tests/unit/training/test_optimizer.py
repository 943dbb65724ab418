"""The schedule and the parameter groups."""

import math

import pytest
from tiny_policy import tiny_model

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import OptimizerConfig
from rollwright.errors import ConfigError
from rollwright.training.optimizers import learning_rate_factor, make_optimizer, make_scheduler


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
