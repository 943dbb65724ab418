"""A run that loses a rank is opened again in the same process, and goes on as after a kill."""

from __future__ import annotations

import os
import signal

import pytest

from rollwright import load_stages
from rollwright.errors import LostRankError, TrainingError
from rollwright.placement.this_machine import ThisMachine
from rollwright.tracking.metrics_file import read_metrics
from rollwright.trainers.loops.supervised import SFTTrainer
from rollwright.trainers.stages import run_config

CONFIG = """
experiment_name: stages
cluster: {fileroot: FILEROOT}
stages:
  - kind: sft
    name: warmup
    model: {path: MODEL, device: cpu}
    train_dataset: {path: arithmetic, batch_size: 2, kwargs: {digits: 1}}
    total_train_steps: 3
"""


@pytest.fixture
def carry_out(tmp_path, tiny_model, monkeypatch):
    """Carries the run out as on Ray; ``losses`` has the steps at which a rank is lost, each once. Returns the losses of the steps."""
    monkeypatch.setattr(ThisMachine, "reopens_after", (LostRankError,))
    update = SFTTrainer.update

    def run(trial, *overrides, losses=(), before_loss=lambda: None):
        left = list(losses)

        def update_or_lose(trainer, batch):
            if trainer.step + 1 in left:
                left.remove(trainer.step + 1)
                before_loss()
                raise LostRankError("rank 1 was lost")
            return update(trainer, batch)

        monkeypatch.setattr(SFTTrainer, "update", update_or_lose)
        config = tmp_path / "stages.yaml"
        config.write_text(CONFIG.replace("FILEROOT", str(tmp_path)).replace("MODEL", str(tiny_model)))
        settings = ["stats_logger.display=none", f"trial_name={trial}", *overrides]
        assert run_config(load_stages(config, settings)) == 0
        assert not left
        records = read_metrics(tmp_path / "stages" / trial / "metrics.jsonl")
        return [(record["step"], record["loss"]) for record in records]

    return run


@pytest.mark.parametrize("settings", [["recover.every_steps=1"], []])
def test_a_run_that_loses_ranks_makes_the_steps_of_an_undisturbed_one(carry_out, tmp_path, settings, caplog):
    undisturbed = carry_out("one")
    assert [step for step, _ in undisturbed] == [1, 2, 3]
    assert carry_out("two", *settings, losses=[2, 3]) == undisturbed
    assert caplog.text.count("rank 1 was lost; trying again") == 2
    assert caplog.text.count("the run goes on from its newest recovery checkpoint and its journal, as after a kill") == 2
    attempts = tmp_path / "stages" / "two" / "attempts"  # a run without a checkpoint begins anew
    assert attempts.exists() != bool(settings)


def test_losses_count_from_zero_after_a_further_step(carry_out):
    carry_out("often", "recover.every_steps=1", losses=[1, 1, 1, 2, 2, 2])
    with pytest.raises(LostRankError, match="ranks were lost 4 times without a further step; the last time: rank 1 was lost"):
        carry_out("too-often", "recover.every_steps=1", losses=[2] * 4)


def test_without_recovery_a_run_is_opened_again_until_it_has_trained(carry_out):
    assert len(carry_out("untrained", "recover.mode=off", losses=[1])) == 3
    with pytest.raises(TrainingError, match=r"rank 1 was lost; with recover\.mode off there is no checkpoint to go on from"):
        carry_out("trained", "recover.mode=off", losses=[2])


def test_a_run_that_was_asked_to_stop_is_not_opened_again(carry_out):
    with pytest.raises(TrainingError, match="was asked to stop, and the current step is lost"):
        carry_out("stopped", losses=[2], before_loss=lambda: os.kill(os.getpid(), signal.SIGTERM))


def test_where_ranks_end_together_a_lost_one_ends_the_run(carry_out, monkeypatch):
    monkeypatch.setattr(ThisMachine, "reopens_after", ())
    with pytest.raises(LostRankError, match=r"^rank 1 was lost$"):
        carry_out("torchrun", losses=[2])
