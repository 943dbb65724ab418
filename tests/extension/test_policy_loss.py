"""A policy loss from a file of the user's own, named in YAML and in Python."""

import pytest
import torch

from rollwright import FSDPPPOActor, PPOActorConfig
from rollwright.cli.main import main
from rollwright.errors import ConfigError
from rollwright.tracking.metrics_file import read_metrics

LOSS = '''
from rollwright import POLICY_LOSSES


@POLICY_LOSSES.register("flat")
def flat_loss(logp_BL, old_logp_BL, advantages_BL, mask_BL, *, height=7.0):
    """The same number for each token, whatever the policy does."""
    return 0.0 * logp_BL + height
'''


@pytest.mark.parametrize(
    ("ways", "loss"),
    [(["policy_loss=flat"], 7.0), (["policy_loss=my_losses:flat_loss", "policy_loss_kwargs={height: 3.0}"], 3.0)],
    ids=["registered", "import path"],
)
def test_a_run_trains_with_it(run_with, user_module, ways, loss):
    folder = user_module("my_losses", LOSS)
    plugins = ["--plugin-dir", str(folder)] if len(ways) == 1 else []
    run, _ = run_with("", *(f"stages.grpo.actor.{way}" for way in ways), *plugins)
    assert read_metrics(run / "metrics.jsonl")[0]["actor/policy_loss"] == pytest.approx(loss)


def test_what_is_no_loss_is_told_with_its_line(tmp_path, user_module, capfd):
    user_module("my_losses", LOSS)
    for name, message in (("clpi", "did you mean 'clip'"), ("my_losses:flat", "did you mean 'flat_loss'")):
        (tmp_path / "run.yaml").write_text(f'actor: {{path: m, policy_loss: "{name}"}}\ntrain_dataset: {{path: arithmetic}}\n')
        assert main(["config", "check", str(tmp_path / "run.yaml")]) != 0
        told = capfd.readouterr().err
        assert "run.yaml:1" in told
        assert "actor.policy_loss" in told
        assert message in told


def test_in_python(tmp_path, monkeypatch):
    (tmp_path / "losses_for_python.py").write_text(LOSS.replace('"flat"', '"flat in python"'))
    monkeypatch.syspath_prepend(tmp_path)
    config = PPOActorConfig(policy_loss="losses_for_python:flat_loss", policy_loss_kwargs={"height": 2.0})
    FSDPPPOActor(config, torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"\['width'\], which the loss.*does not take: it takes height"):
        FSDPPPOActor(PPOActorConfig(policy_loss="flat in python", policy_loss_kwargs={"width": 1}), torch.nn.Linear(1, 1))
