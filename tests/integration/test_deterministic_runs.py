"""A deterministic run gives one curve, however many requests are computed at once, and its episodes can be sampled again alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from rollwright.config.experiment import GRPOConfig
from rollwright.config.loading import build_config
from rollwright.config.source import parse_yaml
from rollwright.data.datasets import get_dataset
from rollwright.trainers.loops.rl import PPOTrainer
from rollwright.trainers.modes.recorded_runs import RunReplay

CONFIG = """
experiment_name: repeats
deterministic: true
workflow: rollwright.workflows.rlvr.RLVRWorkflow
reward_fn: test_deterministic_runs.digits
gconfig: {n_samples: 8, max_new_tokens: 12, temperature: 0.9}
train_dataset: {path: arithmetic, split: train, batch_size: 6, kwargs: {digits: 2}}
stats_logger: {display: none}
total_train_steps: 3
actor: {optimizer: {lr: 5.0e-3}}
"""


def digits(prompt, completion, prompt_ids, completion_ids, **data):
    return sum(character.isdigit() for character in completion) / 12


def curve_of(model, root, *, rows, ahead=0, tasks=6, steps=3):
    """Reward, length and gradient norm of each step, to the last bit."""
    settings = f"rollout: {{max_running_requests: {rows}, max_head_offpolicyness: {ahead}}}\n"
    config = build_config(parse_yaml(CONFIG + settings), [], GRPOConfig)
    config.train_dataset.batch_size, config.total_train_steps = tasks, steps
    config.actor.path, config.cluster.fileroot, config.trial_name = str(model), str(root), f"rows-{rows}"
    with PPOTrainer(config, get_dataset(config.train_dataset, config.actor.path)) as trainer:
        trainer.train()
        directory = trainer.directory.path
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    curve = [(r["step"], r["reward"], r["response_tokens"], r["actor/grad_norm"]) for r in records if "reward" in r]
    return curve, directory


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_curve_is_the_same_for_any_number_of_requests_at_once(tiny_model, tmp_path, ahead):
    curves = [curve_of(tiny_model, tmp_path, rows=rows, ahead=ahead)[0] for rows in (64, 16, 5)]
    assert len(curves[0]) == 3
    assert curves[1] == curves[0]
    assert curves[2] == curves[0]


@pytest.fixture(scope="module")
def recorded(tiny_model, tmp_path_factory):
    return curve_of(tiny_model, tmp_path_factory.mktemp("recorded"), rows=512, tasks=64, steps=2)[1]


def most_at_once(episodes):
    """How many model requests were unanswered at once."""
    calls = [each.call for episode in episodes for each in episode.calls]
    changes = sorted([(call.started, 1) for call in calls] + [(call.finished, -1) for call in calls])
    return max(itertools.accumulate(change for _, change in changes))


def test_an_episode_among_512_is_sampled_again_alone_to_the_same_tokens(recorded, tiny_model):
    with RunReplay(recorded, model=str(tiny_model)) as replay:
        first = [episode for episode in replay.episodes("all") if episode.begin.version == 0]
        later = [episode for episode in replay.episodes("all") if episode.begin.version > 0]
        assert len(first) == 512
        assert most_at_once(first) > 256  # all 512, unless some end before the last have begun
        alone = [again for episode in first[::73] for again in replay.replayer.replay([episode])]
        assert [each.why for each in alone] == [""] * 8
        assert all(each.repeats for each in alone)
        others = list(replay.replayer.replay(later[:48]))
    assert not all(each.repeats for each in others)  # they were sampled with other weights


def test_the_command_says_how_many_episodes_have_the_recorded_tokens(recorded, tiny_model, warm):
    command = ["rollwright", "replay", recorded, "0@v0", "--sample", "--model", tiny_model]
    done = warm.run(command, Path(__file__).parent, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 have the recorded tokens" in done.stdout
