"""Examples that are cut short: their files, with every stage, on few and small tasks.

Whether they learn what the docs say is seen in the whole runs that the docs report; here it is seen that they still run.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WORLD = "size: 30, worlds: 1, world_size: 6, two_hop_share: 0.0"


def mean(values) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def test_the_search_agent_learns_a_world_of_six_articles(run_example):
    run = run_example(
        "search_agent",
        "workflow_kwargs.search_tool={encyclopedia: {worlds: 1, world_size: 6}}",
        "stages.without_search.workflow_kwargs.search_tool=null",
        f"stages.warmup.train_dataset.kwargs={{{WORLD}, worked: true}}",
        *(f"stages.{key}.kwargs={{{WORLD}}}" for key in ("warmup.valid_dataset", "grpo.train_dataset", "grpo.valid_dataset")),
        *(f"stages.{stage}.dataset.kwargs={{{WORLD}}}" for stage in ("before", "after", "without_search")),
        *(f"stages.{stage}.samples={samples}" for stage, samples in (("before", 8), ("after", 8), ("without_search", 0))),
        *("stages.warmup.train_dataset.batch_size=16", "stages.warmup.total_train_steps=80"),
        *("stages.warmup.evaluator.every_steps=5", "stages.warmup.stop_accuracy=0.6"),
        *(
            "stages.grpo.train_dataset.batch_size=30",
            "stages.grpo.total_train_steps=16",
            "stages.grpo.evaluator.every_steps=16",
        ),
    )
    steps = run.steps("rollout/tool_calls")
    assert len(steps) == 16
    assert mean(step["reward"] for step in steps[-4:]) > mean(step["reward"] for step in steps[:4]) + 0.03
    scores = run.evaluations
    assert scores["after"]["mean@8"] > scores["before"]["mean@8"]
    assert "greedy" in scores["without_search"]  # a world this small is known by heart: nothing can be said of the score
    assert "No search engine is connected." in next((run.directory / "without_search" / "rollouts").glob("*.txt")).read_text()
    assert max(step["actor/logprob_difference/max"] for step in steps) < 1e-3
    assert "</search>⟦<information>" in run.last_rollouts()
    run.look_at()
    run.replay()


SHOP = "seed: 1, products: 6, goals: 10, page_size: 2"


def test_the_shop_opens_and_its_customers_buy(run_example):
    """Too short for a rise that is sure; but visits end in purchases, which differ, and the policy moves by them."""
    arguments = f"{{max_steps: 6, system_prompt: '', show_actions: false, shop: {{{SHOP}}}}}"
    run = run_example(
        "shop",
        f"stages.warmup.train_dataset.kwargs={{{SHOP}, worked: true, careless: 0.5, pages: false}}",
        *("stages.warmup.train_dataset.batch_size=8", "stages.warmup.total_train_steps=60"),
        *(f"stages.grpo.tasksets.0.kwargs={{{SHOP}}}", f"stages.grpo.tasksets.0.workflow_args={arguments}"),
        *(f"stages.grpo.eval_tasksets.0.kwargs={{{SHOP}, size: 8}}", f"stages.grpo.eval_tasksets.0.workflow_args={arguments}"),
        *(
            "stages.grpo.eval_tasksets.0.split=train",
            "stages.grpo.train_dataset.batch_size=8",
            "stages.grpo.gconfig.n_samples=4",
        ),
        *("stages.grpo.total_train_steps=5", "stages.grpo.evaluator.every_steps=5"),
    )
    steps = run.steps("actor/grad_norm")
    assert len(steps) == 5
    assert all(-0.1 < step["reward"] < 1.0 and step["reward/std"] > 0.0 and step["actor/grad_norm"] > 0.0 for step in steps)
    assert max(step["reward"] for step in steps) - min(step["reward"] for step in steps) > 0.01
    assert max(step["actor/logprob_difference/max"] for step in steps) < 1e-3
    assert [record["step"] for record in run.steps("eval/reward")] == [0, 5]
    assert "click[buy now]" in run.last_rollouts()


def test_shell_commands_are_scored_by_the_tests_of_task_folders(request, run_example):
    """Too short for a rise that is sure; but commands differ, boxes score them, and the policy moves by the scores."""
    if not request.config.getoption("--whole-examples"):
        pytest.skip("starts 224 boxes, which takes a minute or more: run it with --whole-examples")
    run = run_example(
        "harbor",
        "stages.warmup.train_dataset.kwargs.size=8000",
        "stages.warmup.train_dataset.kwargs.counts={train: 16, valid: 1, test: 8}",
        *("stages.warmup.total_train_steps=110", "stages.grpo.train_dataset.batch_size=8"),
        *("stages.grpo.gconfig.n_samples=4", "stages.grpo.total_train_steps=3", "stages.grpo.evaluator.every_steps=3"),
    )
    steps = run.steps("actor/grad_norm")
    assert len(steps) == 3
    assert 0.0 < mean(step["reward"] for step in steps) < 1.0
    assert any(step["actor/grad_norm"] > 0.0 for step in steps)
    assert max(step["actor/logprob_difference/max"] for step in steps) < 1e-3
    assert [record["step"] for record in run.steps("eval/reward")] == [0, 3]
    run.replay()


SUMS = "stages.{}.evaluator.limit=16"
#: Stages that evaluate on few tasks, whatever they are called.
FEW = [f"stages.{stage}.dataset.limit=16" for stage in ("before", "after")]


def check_steps(run, stage: str) -> list[dict]:
    steps = run.steps("actor/grad_norm", stage)
    assert len(steps) == 3
    assert any(step["actor/grad_norm"] > 0.0 for step in steps)
    assert max(step["actor/logprob_difference/max"] for step in steps) < 1e-3
    assert {"before", "after"} <= set(run.evaluations)
    return steps


def test_an_adapter_is_trained_and_evaluated_with_its_base(run_example):
    run = run_example(
        "lora",
        *("stages.warmup.evaluator.every_steps=10", SUMS.format("warmup"), "stages.warmup.stop_accuracy=0.1", *FEW),
        *("stages.grpo.train_dataset.batch_size=16", "stages.grpo.total_train_steps=3"),
        *("stages.grpo.evaluator.every_steps=3", SUMS.format("grpo")),
    )
    check_steps(run, "grpo")
    saved = {path.name for path in (run.directory / "grpo/checkpoints/final").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= saved
    assert "model.safetensors" not in saved


def test_a_critic_is_trained_beside_the_policy_and_saved(run_example):
    run = run_example(
        "ppo_multi_turn",
        *("stages.warmup.total_train_steps=60", "stages.warmup.evaluator.every_steps=60", "stages.warmup.evaluator.limit=16"),
        *(*FEW, "stages.ppo.train_dataset.batch_size=16", "stages.ppo.total_train_steps=3", "stages.ppo.critic.warmup_steps=0"),
        *("stages.ppo.evaluator.every_steps=3", "stages.ppo.evaluator.limit=16"),
    )
    steps = check_steps(run, "ppo")
    assert all(step["critic/grad_norm"] > 0.0 for step in steps)
    assert (run.directory / "ppo/checkpoints/final/critic/config.json").exists()


def test_a_student_learns_from_a_teacher(run_example):
    run = run_example(
        "distillation",
        *("stages.teacher.total_train_steps=12", "stages.teacher.evaluator.every_steps=12", SUMS.format("teacher")),
        *("stages.warmup.total_train_steps=12", "stages.warmup.evaluator.every_steps=12", SUMS.format("warmup"), *FEW),
        *(
            "stages.teacher_after.dataset.limit=16",
            "stages.distill.train_dataset.batch_size=16",
            "stages.distill.total_train_steps=3",
        ),
        *("stages.distill.evaluator.every_steps=3", SUMS.format("distill")),
    )
    steps = check_steps(run, "distill")
    assert all(step["actor/teacher/kl"] > 0.0 and step["actor/teacher/taught_share"] == 1.0 for step in steps)
    assert "teacher_after" in run.evaluations


def test_a_policy_plays_kuhn_poker_against_itself_and_its_first_version(run_example):
    run = run_example(
        "self_play",
        *("stages.warmup.total_train_steps=60", "stages.play.gconfig.n_samples=8", "stages.play.total_train_steps=3"),
        *("stages.play.evaluator.every_steps=3", "stages.against_version_0.samples=2"),
    )
    steps = check_steps(run, "play")
    assert all(0.0 < step["rows/second"] <= step["rows/first"] == 48.0 for step in steps)
    assert [record["step"] for record in run.steps("eval/rollout/exploitability", "play")] == [0, 3]
    assert -1.0 < run.evaluations["after"]["greedy"] < 0.0  # the exploitability
    assert {"mean@2", "mean@2/first", "mean@2/second"} <= set(run.evaluations["against_version_0"])


def test_moves_of_a_drawn_game_are_conversations_of_their_own(run_example):
    run = run_example(
        "nim",
        *("stages.model.hidden_size=64", "stages.model.head_dim=16", "stages.warmup.train_dataset.kwargs.size=1000"),
        *("stages.warmup.total_train_steps=60", "stages.play.train_dataset.batch_size=16", "stages.play.total_train_steps=3"),
        *("stages.play.evaluator.every_steps=3", "stages.against_version_0.samples=0"),
        *("stages.generalize.train_dataset.batch_size=16", "stages.generalize.total_train_steps=3"),
    )
    steps = [*check_steps(run, "play"), *check_steps(run, "generalize")]
    assert all(step["sequence_tokens"] < 35.0 < 16.0 * 8.0 < step["rows/first"] + step["rows/second"] for step in steps)
    assert all(0.0 < step["rollout/replaced"] < step["rollout/moves"] for step in steps)  # games stay out of held-out positions
    assert 0.0 <= run.evaluations["after"]["greedy"] <= 1.0
    assert {"greedy/first", "greedy/second"} <= set(run.evaluations["against_version_0"])


def test_lakes_are_walked_in_several_turns(run_example):
    """Too short to learn: maps are walked move by move, and the policy moves if some of a map's walks reach the goal."""
    pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install 'rollwright[gymnasium]'")
    run = run_example(
        "frozen_lake",
        "stages.warmup.train_dataset.kwargs={size: 300, worked: true, walks: 2, knowing_share: 1.0}",
        *("stages.warmup.total_train_steps=60", "stages.grpo.train_dataset.batch_size=4", "stages.grpo.gconfig.n_samples=4"),
        *(
            "stages.grpo.eval_tasksets.0.kwargs.size=8",
            "stages.grpo.total_train_steps=2",
            "stages.grpo.eval_tasksets.1.kwargs.size=8",
            "stages.grpo.evaluator.every_steps=2",
        ),
    )
    steps = run.steps("reward")
    assert len(steps) == 2
    assert all(0.0 <= step["reward"] <= 1.0 and 1.0 < step["rollout/turns"] <= 10.0 for step in steps)
    assert max(step["actor/logprob_difference/max"] for step in steps) < 1e-3
    assert [record["step"] for record in run.steps("eval/reward")] == [0, 2]
    assert "<|user|>a1S" in run.last_rollouts()


def test_a_solver_and_a_critic_are_trained_and_scored_apart(run_example):
    games = ("before", "before_alone", "after", "after_without_critic", "after_alone")
    stages = (*games, "critic_before", "critic_after")
    run = run_example(
        "solver_critic",
        *(
            "stages.warmup.train_dataset.batch_size=16",
            "stages.warmup.train_dataset.kwargs.size=480",
            "stages.warmup.total_train_steps=30",
        ),
        *(f"stages.{stage}.dataset.limit=2" for stage in games),
        *(f"stages.{stage}.samples=2" for stage in stages),
        *(f"stages.{stage}.train_dataset.batch_size=4" for stage in ("together", "alone")),
        *(f"stages.{stage}.total_train_steps=2" for stage in ("together", "alone")),
    )
    steps, alone = run.steps("actor/grad_norm", "together"), run.steps("actor/grad_norm", "alone")
    assert len(steps) == len(alone) == 2
    assert all(step["rows/critic"] >= step["rows/solver"] == 32.0 for step in steps)
    assert all(step["actor/grad_norm"] > 0.0 and 0.0 <= step["reward/critic"] <= 1.0 for step in steps)
    assert all(step["rows/solver"] == 32.0 and "rows/critic" not in step for step in alone)
    scores = run.evaluations
    assert set(scores) == set(stages)
    assert {stage for stage in stages if "mean@2/critic" in scores[stage]} == {"before", "after"}
    assert scores["before_alone"]["mean@2"] == scores["before_alone"]["mean@2/solver"]


CLIENTS = Path(__file__).resolve().parents[2]
VERIFIERS = CLIENTS / ".venv-clients-verifiers3"


def test_an_environment_of_verifiers_scores_what_is_trained(run_example):
    if not list(VERIFIERS.glob("lib/*/site-packages/reverse_text.py")):
        pytest.skip(f"reverse-text is not installed in {VERIFIERS}: examples/reverse_text.yaml says how to install it")
    datasets = ("before.dataset", "grpo.train_dataset", "after.dataset")
    run = run_example(
        "reverse_text",
        *(f"stages.{dataset}.kwargs.python={VERIFIERS / 'bin' / 'python'}" for dataset in datasets),
        *("stages.before.dataset.limit=8", "stages.after.dataset.limit=8", "stages.grpo.train_dataset.batch_size=4"),
        *("stages.warmup.total_train_steps=30", "stages.grpo.total_train_steps=3"),
    )
    steps = run.steps("actor/grad_norm")
    assert len(steps) == 3
    assert all(0.0 < step["reward"] < 1.0 and step["actor/grad_norm"] > 0.0 for step in steps)
    assert max(step["actor/logprob_difference/max"] for step in steps) < 1e-3
    assert set(run.evaluations) == {"before", "after"}
    assert "Reverse the text character-by-character." in run.last_rollouts()


AGENTS = CLIENTS / ".venv-clients-openai2"


def test_a_program_repairs_files_in_eight_episodes(request, run_example):
    """Too short to learn: mini-swe-agent works in its boxes, is scored, and the policy moves by the scores that differ."""
    if not request.config.getoption("--whole-examples"):
        pytest.skip(
            "three stages import mini-swe-agent anew, which takes a minute on a busy machine: run it with --whole-examples"
        )
    if not (AGENTS / "bin" / "mini").exists():
        pytest.skip("mini-swe-agent is not installed: scripts/make_client_envs.sh")
    run = run_example(
        "command_agent",
        *(f"workflow_kwargs.programs=[{AGENTS}]", "workflow_kwargs.boxes=1"),
        *("stages.model.hidden_size=64", "stages.model.layers=2", "stages.model.intermediate_size=128"),
        *("stages.warmup.total_train_steps=30", "stages.warmup.train_dataset.batch_size=16"),
        *("stages.before.dataset.kwargs.size=2", "stages.after.dataset.kwargs.size=2"),
        *("stages.grpo.train_dataset.batch_size=1", "stages.grpo.gconfig.n_samples=4", "stages.grpo.total_train_steps=1"),
    )
    (step,) = run.steps("actor/grad_norm")
    assert 0.0 <= step["reward"] <= 1.0
    assert step["rollout/agent_model_calls"] >= 1.0
    assert step["actor/logprob_difference/max"] < 1e-3
    assert set(run.evaluations) == {"before", "after"}
    assert "<|system|>Repair the file.<|end|><|user|>" in run.last_rollouts()
