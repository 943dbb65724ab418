"""``rollwright sequences``: from a model on disk to a table on disk."""

import csv
import json
import math

import pytest

from rollwright.cli.main import main


def run(model, out, *arguments):
    common = ("sequences", str(model), "-o", str(out), "-G", "3", "--max-new-tokens", "6", "--seed", "1", "--format", "jsonl")
    return main([*common, "--device", "cpu", *arguments])


def test_an_experiment_becomes_shards_and_a_table(tiny_model, tmp_path, capsys):
    assert run(tiny_model, tmp_path / "x", "--prompt", "1+1=", "--prompt", "[b]2+2", "--temperature", "0.7") == 0
    shown = capsys.readouterr().out
    assert "1+1=" in shown
    assert "[b]2+2" in shown
    rows = [json.loads(line) for line in (tmp_path / "x" / "shard-00000.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    with (tmp_path / "x" / "prompts.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["prompt"] for row in table] == ["1+1=", "[b]2+2"]
    first = rows[:3]
    tokens = sum(len(row["response_ids"]) for row in first)
    assert float(table[0]["length"]) == pytest.approx(tokens / 3)
    assert float(table[0]["entropy"]) == pytest.approx(sum(sum(row["entropies"]) for row in first) / tokens)
    assert float(table[0]["sequence_logprob"]) == pytest.approx(sum(row["sequence_logprob"] for row in first) / 3)
    assert math.isfinite(float(table[0]["entropy_variance"]))

    assert run(tiny_model, tmp_path / "x", "--prompt", "1+1=", "--prompt", "[b]2+2", "--temperature", "0.7") == 1
    assert "resume=True" in capsys.readouterr().err
    assert run(tiny_model, tmp_path / "x", "--prompt", "1+1=", "--prompt", "[b]2+2", "--temperature", "0.7", "--resume") == 0


def test_a_dataset_with_a_path_and_an_adapter(tiny_model, tmp_path):
    peft = pytest.importorskip("peft")
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "How many?", "answer": "Two.\\n#### 2"}\n' * 3)
    arguments = (
        "--dataset",
        "gsm8k_r1_template",
        "--split",
        "test",
        "--dataset-path",
        str(tmp_path / "gsm8k"),
        "--prompts",
        "2",
    )
    assert run(tmp_path / "adapter", tmp_path / "x", *arguments) == 0
    assert len((tmp_path / "x" / "shard-00000.jsonl").read_text().splitlines()) == 6


def test_wrong_use_is_one_line(tiny_model, tmp_path, capsys):
    assert run(tiny_model, tmp_path / "x") == 1
    assert "give prompts or dataset_name" in capsys.readouterr().err
    assert run(tiny_model, tmp_path / "x", "--prompt", "1", "--gen-batch-size", "many") == 1
    assert "give a number from 1 on, or auto" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
