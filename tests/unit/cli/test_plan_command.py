from __future__ import annotations

from typer.testing import CliRunner

from rollwright.cli.main import build_app

SHAPE = "qwen3:hidden_size=256,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=768,vocab_size=1024"


def plan(*words):
    return CliRunner().invoke(build_app("plan"), ["plan", *words])


def test_a_node_is_divided_and_the_largest_training_is_shown():
    result = plan("--model", SHAPE, "--gpus", "4x8")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.output.splitlines() if line.endswith("yes")] == ["3", "2", "1"]
    assert "GPU 2: rank 2 (" in result.output
    assert "GPU 3: server 0 (" in result.output
    assert "a publication sends 0.00 GB to each server" in result.output


def test_one_run_is_planned_and_fails_if_it_does_not_fit():
    result = plan("--model", SHAPE, "--gpus", "2x8", "cluster.processes=2")
    assert result.exit_code == 1
    assert "does not fit: 3 GPUs are needed, and there are 2" in result.output


def test_gpus_that_cannot_be_read():
    result = plan("--model", SHAPE, "--gpus", "8")
    assert result.exit_code == 1
    assert "8x80" in str(result.exception)


def test_a_model_has_to_be_named():
    assert "no model is named: give --model" in str(plan().exception)
