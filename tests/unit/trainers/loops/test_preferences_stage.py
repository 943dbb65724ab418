"""A stage of kind dpo, from rows in a file to a model that prefers; saver and recover are honoured by both supervised kinds."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollwright import load_stages
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import ConfigError
from rollwright.trainers.loops.supervised import preference_batch
from rollwright.trainers.stages import run_config

CONFIG = """\
experiment_name: preferences
cluster: {fileroot: FILEROOT, threads: 1}
stats_logger: {display: none, dump_rollouts: 0}
stages:
  - kind: dpo
    name: prefer
    model: {path: MODEL, optimizer: {lr: 3.0e-3}}
    train_dataset: {path: FILEROOT/pairs.jsonl, batch_size: 4}
    beta: 0.2
    total_train_steps: STEPS
    saver: {every_steps: 2, keep: 1}
    recover: {every_steps: 3, keep: 1}
"""


def write_pairs(directory) -> list[dict]:
    rows = [{"prompt": f"{number}+1=", "chosen": "yes", "rejected": "no"} for number in range(8)]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{"messages": [{"role": "user", "content": row["prompt"]}], **row} for row in rows]


def stages_of(tmp_path, tiny_model, steps: int, *overrides: str):
    file = tmp_path / "dpo.yaml"
    text = CONFIG.replace("FILEROOT", str(tmp_path)).replace("MODEL", str(tiny_model)).replace("STEPS", str(steps))
    file.write_text(text)
    return load_stages(file, overrides)


def margins(path, rows) -> torch.Tensor:
    """How much likelier the preferred reply is, in nats."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = preference_batch(rows, load_tokenizer(str(path)))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits, -1)
    picked = logprobs[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0] * batch["loss_mask"][:, 1:]
    return picked.sum(-1)[0::2] - picked.sum(-1)[1::2]


def test_a_stage_learns_what_is_preferred(tmp_path, tiny_model):
    rows = write_pairs(tmp_path)
    assert run_config(stages_of(tmp_path, tiny_model, 12)) == 0
    part = tmp_path / "preferences" / "trial"
    before, after = margins(tiny_model, rows), margins(part / "checkpoints" / "final", rows)
    assert (after - before).min() > 1
    steps = [json.loads(line) for line in (part / "metrics.jsonl").read_text().splitlines()]
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["model/accuracy"] == 1.0
    assert sorted(path.name for path in (part / "checkpoints").iterdir()) == ["final", "step-000012"]  # saver.keep
    assert [path.name for path in (part / "recover").iterdir()] == ["step_00000012"]


def test_a_stage_that_was_ended_goes_on_as_if_it_had_not_been(tmp_path, tiny_model, monkeypatch):
    from rollwright.training.preferences import PreferenceEngine

    write_pairs(tmp_path)
    update, calls = PreferenceEngine.dpo_update, []

    def dying(self, *arguments, **keys):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return update(self, *arguments, **keys)

    whole, ended = (stages_of(tmp_path, tiny_model, 6, f"trial_name={name}") for name in ("whole", "ended"))
    assert run_config(whole) == 0
    monkeypatch.setattr(PreferenceEngine, "dpo_update", dying)
    with pytest.raises(KeyboardInterrupt):
        run_config(ended)
    assert run_config(ended) == 0  # from the checkpoint after step 3
    assert len(calls) == 5 + 3
    finals = [tmp_path / "preferences" / name / "checkpoints" / "final" for name in ("whole", "ended")]
    first, second = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict() for path in finals)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.prefer.train_dataset.type=sft", "this stage trains on rows of type preference"),
        ("stages.prefer.beta=0", "beta"),
        ("stages.prefer.model.optimizer=null", "the model is trained"),
    ],
)
def test_what_a_stage_cannot_do_is_refused(tmp_path, tiny_model, override, message):
    with pytest.raises(ConfigError, match=message):
        stages_of(tmp_path, tiny_model, 1, override)
