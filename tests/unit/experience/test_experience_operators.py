"""Operators between explorer and trainer: what they keep, change and count."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.config.modes import OperatorConfig
from rollwright.errors import ConfigError, TrajectoryError
from rollwright.experience.experience import Experience, ExperienceId
from rollwright.experience.operators import OPERATORS, ExperienceOperator, ExperiencePipeline


def experience(reward=1.0, *, length=4, task="t", run=0, truncated=False, **fields) -> Experience:
    return Experience(
        tokens=[1] * (2 + length),
        prompt_length=2,
        reward=reward,
        truncated=truncated,
        eid=ExperienceId(task=task, run=run),
        **fields,
    )


def apply(name, samples, **args):
    return ExperiencePipeline([OperatorConfig(name, args)]).apply(samples)


def rewards(result):
    return [each.reward for sample in result.samples for each in sample]


def test_reward_filter_keeps_the_range_and_counts_the_rest():
    result = apply("reward_filter", [experience(r) for r in (0.0, 0.5, 1.0, float("nan"))], threshold=0.5, maximum=0.9)
    assert rewards(result) == [0.5]
    assert result.drops == {"reward_filter": 3}
    assert result.metrics == {"reward_filter/kept_share": 0.25}


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.floats(0, 2))
def test_no_variance_filter_agrees_with_the_standard_deviation(values, threshold):
    expected = statistics.pstdev(values)
    if abs(expected - threshold) > 1e-9:
        result = apply("no_variance_filter", [experience(value) for value in values], threshold=threshold)
        assert rewards(result) == (values if expected > threshold else [])


def test_groups_are_judged_apart():
    mixed = [experience(0.0, task="a"), experience(1.0, task="a"), experience(1.0, task="b"), experience(1.0, task="b")]
    result = apply("reward_std_filter", mixed)
    assert rewards(result) == [0.0, 1.0]
    assert result.metrics["reward_std_filter/dropped_groups_share"] == 0.5


def test_reward_shaping_by_info_metrics_and_length():
    samples = [experience(1.0, length=10, info={"quality": 0.5}, metrics={"tools": 2.0})]
    steps = [
        {"stats_key": "quality", "op_type": "ADD", "weight": 2.0},
        {"stats_key": "tools", "op_type": "mul"},
        {"stats_key": "response_length", "op_type": "SUB", "weight": 0.1},
        {"stats_key": "tools", "op_type": "DIV"},
    ]
    result = apply("reward_shaping", samples, reward_shaping_configs=steps)
    assert rewards(result) == [pytest.approx(((1.0 + 1.0) * 2.0 - 1.0) / 2.0)]
    assert result.metrics["reward_shaping/reward_diff/mean"] == pytest.approx(0.5)


def test_reward_shaping_refuses_what_is_missing():
    with pytest.raises(TrajectoryError, match=r"'reward_shaping' failed .* has no 'speed' .*response_length"):
        apply("reward_shaping", [experience()], reward_shaping_configs=[{"stats_key": "speed"}])
    with pytest.raises(ConfigError, match="is not understood"):
        apply("reward_shaping", [experience()], reward_shaping_configs=[{"stats_key": "speed", "op_type": "POW"}])
    step = {"stats_key": "zero", "op_type": "DIV"}
    with pytest.raises(TrajectoryError, match="divided by 'zero'"):
        apply("reward_shaping", [experience(info={"zero": 0.0})], reward_shaping_configs=[step])


@pytest.mark.parametrize(("length", "punished"), [(80, 0.0), (81, 0.05), (90, 0.5), (100, 1.0), (120, 1.0)])
def test_overlong_shaping_is_daposs_formula(length, punished):
    result = apply("overlong_shaping", [experience(1.0, length=length)], max_length=100, buffer=20)
    assert rewards(result) == [pytest.approx(1.0 - punished)]


def test_truncation_mask_clears_or_drops():
    def samples():
        return [experience(1.0, truncated=True), experience(0.0)]

    result = apply("truncation_mask", samples())
    assert rewards(result) == [1.0, 0.0]
    assert not result.samples[0][0].action_mask.any()
    assert result.samples[1][0].action_mask is None
    assert result.drops == {}
    result = apply("truncation_mask", samples(), drop=True)
    assert rewards(result) == [0.0]
    assert result.drops == {"truncation_mask": 1}
    with pytest.raises(TrajectoryError, match="does not say whether it was truncated"):
        apply("truncation_mask", [experience(truncated=None)])


def test_pass_rate_counts_samples_not_rows():
    samples = [[experience(1.0), experience(1.0), experience(1.0)], experience(0.0), experience(0.0), experience(1.0)]
    result = apply("pass_rate", samples)
    assert result.metrics == {"pass_rate/mean": 0.5}
    assert {each.info["pass_rate"] for sample in result.samples for each in sample} == {0.5}
    assert apply("pass_rate", samples, maximum=0.4).drops == {"pass_rate": 6}


def test_steps_run_in_order_and_samples_keep_their_rows():
    pipeline = ExperiencePipeline(
        [OperatorConfig("reward_filter", {"threshold": 0.5}), OperatorConfig("no_variance_filter"), OperatorConfig("pass_rate")]
    )
    first, second, third = [experience(0.6), experience(0.0)], experience(1.0), experience(0.1)
    result = pipeline.apply([first, second, third])
    assert [[each.reward for each in sample] for sample in result.samples] == [[0.6], [1.0]]
    assert result.drops == {"reward_filter": 2}
    result = pipeline.apply([experience(1.0), experience(1.0)])
    assert result.samples == []
    assert result.drops == {"no_variance_filter": 2}
    assert "pass_rate/mean" not in result.metrics


def test_users_add_operators_by_name_path_and_object():
    @OPERATORS.register_module("test_doubling")
    class Doubling(ExperienceOperator):
        def process(self, experiences):
            return [*experiences, *[experience(each.reward * 2) for each in experiences]], {"made": len(experiences)}

    result = apply("test_doubling", [experience(1.0), experience(2.0)])
    assert [[each.reward for each in sample] for sample in result.samples] == [[1.0], [2.0], [2.0], [4.0]]
    assert result.metrics == {"test_doubling/made": 2.0}
    by_path = ExperiencePipeline([OperatorConfig("rollwright.experience.operators.RewardFilter", {"threshold": 2.0})])
    assert by_path.apply([experience(1.0)]).samples == []
    assert ExperiencePipeline([("mine", Doubling())]).apply([experience(1.0)]).metrics == {"mine/made": 1.0}

    with pytest.raises(ConfigError, match="is taken by"):

        @OPERATORS.register_module("test_doubling")
        class Other(ExperienceOperator):
            def process(self, experiences):
                return experiences, {}


def test_an_operator_that_raises_is_named():
    class Broken(ExperienceOperator):
        def process(self, experiences):
            raise RuntimeError("no")

    with pytest.raises(TrajectoryError, match="operator 'broken' failed on the experiences of group '/t': RuntimeError: no"):
        ExperiencePipeline([("broken", Broken())]).apply([experience()])


def test_wrong_names_and_arguments_are_config_errors():
    with pytest.raises(ConfigError, match="Did you mean 'reward_filter'"):
        ExperiencePipeline([OperatorConfig("reward_filtre")])
    with pytest.raises(ConfigError, match=r"operator 'nowhere\.Operator' was not found"):
        ExperiencePipeline([OperatorConfig("nowhere.Operator")])
    with pytest.raises(ConfigError, match=r"it takes \(threshold"):
        ExperiencePipeline([OperatorConfig("reward_filter", {"limit": 1})])
    for name, args in [
        ("reward_filter", {"threshold": 1.0, "maximum": 0.0}),
        ("overlong_shaping", {"max_length": 5, "buffer": 9}),
        ("pass_rate", {"minimum": 0.9, "maximum": 0.1}),
    ]:
        with pytest.raises(ConfigError):
            ExperiencePipeline([OperatorConfig(name, args)])


def test_a_missing_reward_is_an_error():
    with pytest.raises(TrajectoryError, match="has no reward"):
        apply("no_variance_filter", [experience(None)])
    assert math.isnan(rewards(apply("truncation_mask", [experience(float("nan"))]))[0])
