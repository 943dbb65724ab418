"""What is no override, and what one takes out."""

import pytest

from rollwright import PPOConfig, load_expr_config
from rollwright.config.overrides import parse_override
from rollwright.errors import ConfigError


@pytest.mark.parametrize("text", ["novalue", "=3", "a..b=1"])
def test_overrides_that_are_none(text):
    with pytest.raises(ConfigError, match="key=value"):
        parse_override(text)


def test_null_drops_what_a_file_says_of_a_section(tmp_path):
    file = tmp_path / "f.yaml"
    file.write_text(
        "actor: {path: m}\ntrain_dataset: {path: arithmetic}\nevaluator: {every_steps: 2, gconfig: {greedy: false}}\n"
    )
    config, _ = load_expr_config(
        ["--config", str(file), "evaluator=null", "workflow=rlvr", "reward_fn=numeric_reward"], PPOConfig
    )
    assert config.evaluator == PPOConfig().evaluator
