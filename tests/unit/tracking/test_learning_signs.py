"""A run that cannot learn says so: by its settings at the start, and by steps in which nothing was learned."""

from random import Random

import pytest

from rollwright.config.experiment import GRPOConfig, SFTConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import OptimizerConfig
from rollwright.config.tasksets import TasksetConfig
from rollwright.tracking.curve_signs import STEPS_WITHOUT_LEARNING, signs_of
from rollwright.tracking.decline import decline_of
from rollwright.tracking.learning_signs import LearningWatch, reasons_not_to_learn


def changed(**keys):
    config = GRPOConfig()
    for dotted, value in keys.items():
        *above, name = dotted.split("__")
        holder = config
        for part in above:
            holder = getattr(holder, part)
        setattr(holder, name, value)
    return config


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"gconfig__greedy": True}, ["gconfig has greedy: true", "temperature such as 1.0"]),
        ({"gconfig__temperature": 0.0}, ["gconfig has temperature: 0", "evaluator.gconfig"]),
        ({"actor__optimizer": OptimizerConfig(lr=1e3)}, ["actor.optimizer.lr is 1000", "0.01 or less"]),
        ({"actor__reward_scaling": 0.0}, ["actor.reward_scaling is 0", "Set it to 1"]),
    ],
)
def test_settings_that_cannot_learn_are_named_with_what_to_change(keys, words):
    (reason,) = reasons_not_to_learn(changed(**keys))
    assert all(word in reason for word in words)


def test_ordinary_settings_are_not_spoken_of():
    assert list(reasons_not_to_learn(GRPOConfig())) == []
    assert list(reasons_not_to_learn(SFTConfig())) == []
    (reason,) = reasons_not_to_learn(SFTConfig(model=changed(actor__optimizer=OptimizerConfig(lr=1.0)).actor))
    assert reason.startswith("model.optimizer.lr is 1:")


def test_tasksets_are_sampled_by_their_own_arguments():
    greedy = GenerationHyperparameters(greedy=True)
    own = changed(gconfig=greedy, tasksets=[TasksetConfig(path="a", gconfig=GenerationHyperparameters())])
    assert list(reasons_not_to_learn(own)) == []
    second = changed(tasksets=[TasksetConfig(path="a"), TasksetConfig(path="b", gconfig=greedy)])
    assert [reason.split(" ")[0] for reason in reasons_not_to_learn(second)] == ["tasksets[1].gconfig"]


def test_a_process_is_judged_by_what_it_does():
    wrong = {"gconfig__greedy": True, "actor__reward_scaling": 0.0}
    assert [reason.split(" ")[0] for reason in reasons_not_to_learn(changed(mode="explore", **wrong))] == ["gconfig"]
    assert [reason.split(" ")[0] for reason in reasons_not_to_learn(changed(mode="train", **wrong))] == ["actor.reward_scaling"]


def test_steps_that_teach_nothing_are_told_once_and_a_good_one_starts_the_count_anew(caplog):
    idle, good = {"advantage/abs_mean": 1e-9, "optimizer_steps": 1.0}, {"advantage/abs_mean": 0.5, "optimizer_steps": 1.0}
    watch = LearningWatch()
    with caplog.at_level("WARNING"):
        for stats in [*[idle] * (STEPS_WITHOUT_LEARNING - 1), good, *[idle] * (STEPS_WITHOUT_LEARNING - 1)]:
            watch.after_step(stats, 0.0)
        assert caplog.records == []
        for stats in [idle, idle, good, *[idle] * (2 * STEPS_WITHOUT_LEARNING)]:
            watch.after_step(stats, 0.125)
    (record,) = caplog.records
    assert "no group has samples of different rewards (the mean reward is 0.125)" in record.getMessage()
    assert "gconfig.n_samples" in record.getMessage()


def test_steps_without_any_trained_token_say_that_they_are_masked(caplog):
    watch = LearningWatch()
    with caplog.at_level("WARNING"):
        for _ in range(STEPS_WITHOUT_LEARNING):
            watch.after_step({"optimizer_steps": 0.0, "skipped_steps": 0.0, "masked_share": 1.0}, 0.5)
    (record,) = caplog.records
    assert "every sampled token is masked" in record.getMessage()


@pytest.mark.parametrize(
    "stats",
    [
        {"optimizer_steps": 0.0, "critic/optimizer_steps": 1.0},  # the critic is trained alone
        {"optimizer_steps": 1.0, "advantage/abs_mean": 0.0, "teacher/loss": 0.3},  # a teacher's loss without rewards
    ],
)
def test_a_warm_up_of_the_critic_and_a_teacher_are_something_to_learn_from(stats, caplog):
    watch = LearningWatch()
    with caplog.at_level("WARNING"):
        for _ in range(2 * STEPS_WITHOUT_LEARNING):
            watch.after_step(stats, 0.0)
    assert caplog.records == []


@pytest.mark.parametrize(
    "config",
    [
        {"actor.adv_estimator": "gae"},
        {"actor.adv_norm.mean_level": "batch"},
        {"actor.distillation.loss": "k1", "actor.distillation.reward_weight": 0.0},
    ],
)
def test_groups_of_one_are_no_sign_where_nothing_is_compared_within_a_group(config):
    curves = {"actor/groups_without_variance": flat(1.0), "reward": flat(0.5)}
    assert list(signs_of(lambda name: curves.get(name, []), config)) == []
    assert [sign.rule for sign in signs_of(lambda name: curves.get(name, []), {})] == ["one_reward_only"]
    taught = {"actor/advantage/abs_mean": flat(0.0), "actor/teacher/loss": flat(0.1)}
    assert list(signs_of(lambda name: taught.get(name, []), config)) == []


def flat(value, steps=12):
    return [(step, value) for step in range(1, steps + 1)]


CURVES = {
    "one_reward_only": ({"actor/groups_without_variance": flat(0.92), "reward": flat(0.02)}, "bad", "92% of groups"),
    "nothing_learned": ({"actor/advantage/abs_mean": flat(0.0)}, "bad", "last 5 had an advantage"),
    "skipped_steps": ({"actor/skipped_steps": [*flat(0.0), (13, 1.0)]}, "bad", "actor.optimizer.lr"),
    "truncated": ({"truncated": flat(0.4)}, "warn", "40% of samples are truncated"),
    "engine_mismatch": ({"actor/logprob_difference/mean": flat(0.05)}, "warn", "0.050 nats"),
    "clipped": ({"actor/clip_share": flat(0.5)}, "warn", "50% of tokens"),
    "far_from_reference": ({"actor/kl": flat(3.0)}, "warn", "actor.kl_ctl"),
    "reward_clipped": ({"actor/reward_clipped_share": flat(0.1)}, "warn", "actor.reward_scaling"),
    "masked": ({"actor/masked_share": flat(0.6)}, "warn", "60% of sampled tokens"),
    "entropy_collapse": ({"actor/entropy": [*flat(1.0, 5), *((step, 0.001) for step in range(6, 20))]}, "warn", "fell from 1 to 0.001"),
    "worse_held_out": (
        {"eval/reward": [(0, 0.5), (5, 0.8), (10, 0.6)], "reward": [(5, 0.8), (10, 0.95)]}, "warn", "fell from 0.8 (step 5) to 0.6",
    ),
    "waits_for_samples": ({"seconds/generate": flat(6.0), "seconds/train": flat(4.0)}, "info", "60% of a step is sampling"),
    "decline": (
        {"reward": [*flat(0.4, 6), *((step, 0.0) for step in range(7, 13))], "actor/kl": [*flat(0.01, 6), *((step, 0.4) for step in range(7, 13))]},
        "bad", "fell from 0.4 (step 2) to 0, beginning with step 7. Since then: KL to the reference 0.01 → 0.4",
    ),
    "samples_failed": ({"samples/failed": flat(1.0), "samples/accepted": flat(9.0)}, "bad", "10% of samples failed in the last steps (10)"),
    "samples_rejected": ({"samples/rejected": flat(4.0), "samples/accepted": flat(4.0)}, "warn", "rejected 50% of samples"),
    "groups_dropped": ({"groups/dropped/stale": flat(6.0), "groups/accepted": flat(2.0)}, "warn", "75% of complete groups were dropped"),
}  # fmt: skip


@pytest.mark.parametrize("rule", CURVES)
def test_curves_say_what_is_wrong(rule):
    curves, level, words = CURVES[rule]
    config = {"rollout.max_head_offpolicyness": 0, "rollout.addresses": ["gpu:30000"]}
    (sign,) = signs_of(lambda name: curves.get(name, []), config)
    assert (sign.rule, sign.level) == (rule, level)
    assert words in sign.message
    assert sign.step == max(step for points in curves.values() for step, _ in points)


def test_a_run_that_learns_has_no_sign():
    curves = {
        "reward": [(step, step / 20) for step in range(1, 20)],
        "actor/groups_without_variance": flat(0.3),
        "actor/advantage/abs_mean": flat(0.4),
        "actor/entropy": flat(0.5),
        "truncated": flat(0.01),
        "eval/reward": [(0, 0.1), (5, 0.4), (10, 0.6)],
    }
    assert list(signs_of(lambda name: curves.get(name, []), {})) == []


def test_tasks_that_are_too_easy_are_told_from_those_that_are_too_hard():
    curves = {"actor/groups_without_variance": flat(0.95), "reward": flat(0.98)}
    (sign,) = signs_of(lambda name: curves.get(name, []), {})
    assert "too easy" in sign.message
    assert sign.setting == "train_dataset"


def test_what_was_solved_once_is_not_too_hard():
    """A collapse: every group has the reward 0, which it had not before."""
    reward = [*flat(0.27, 6), *((step, 0.0) for step in range(7, 25))]
    curves = {"reward": reward, "actor/groups_without_variance": [*flat(0.3, 6), *((step, 1.0) for step in range(7, 25))]}
    curves |= {
        "eval/reward": [(4, 0.41), (8, 0.02), (12, 0.0), (24, 0.0)],
        "response_tokens": [(s, 12.0 if v else 1.0) for s, v in reward],
    }
    found = {sign.rule: sign for sign in signs_of(lambda name: curves.get(name, []), {"actor.optimizer.lr": 8e-3})}
    assert list(found) == ["decline", "one_reward_only"]
    decline = found["decline"]
    assert (decline.began, decline.samples) == (7, "step=7-24&eval=0&order=tokens")
    for words in ("held-out reward fell from 0.41 (step 4) to 0", "tokens a sample 12 → 1", "Lower actor.optimizer.lr (0.008)"):
        assert words in decline.message
    assert "too hard" not in found["one_reward_only"].message
    hopeless = {"reward": flat(0.0, 20), "actor/groups_without_variance": flat(1.0, 20)}
    (sign,) = signs_of(lambda name: hopeless.get(name, []), {})
    assert "too hard" in sign.message


@pytest.mark.parametrize(
    "curve", [[0.1, 0.3, 0.15, 0.25, 0.1], [0.2] * 30, [value / 30 for value in range(30)], [0.5, 0.0], []]
)
def test_noise_and_learning_are_no_decline(curve):
    assert decline_of(list(enumerate(curve, 1))) is None


@pytest.mark.parametrize(("length", "begins"), [(20, 9), (60, 31), (200, 101), (400, 150)])
def test_a_decline_begins_where_the_curve_left_its_best(length, begins):
    random = Random(length)
    curve = [(step, (0.8 if step < begins else 0.3) + random.uniform(-0.05, 0.05)) for step in range(1, length + 1)]
    found = decline_of(curve)
    assert found is not None
    assert abs(found.began - begins) <= 1
    assert found.share == pytest.approx(0.62, abs=0.08)


def test_alternating_steps_of_the_built_in_engine_are_no_finding():
    """It computes where the trainer does, so nothing would be gained by sampling at the same time."""
    curves = {"seconds/generate": flat(6.0), "seconds/train": flat(4.0)}
    assert (
        signs_of(lambda name: curves.get(name, []), {"rollout.max_head_offpolicyness": 0, "rollout.backend": "builtin"}) == []
    )
