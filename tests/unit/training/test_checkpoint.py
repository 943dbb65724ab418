"""What is written is read back exactly, whole or not at all, and training goes on from it bit for bit."""

import json
import random

import numpy
import pytest
import torch
from tiny_policy import tiny_actor, tiny_batch

from rollwright.atomic import replaced_directory
from rollwright.config.sections import OptimizerConfig
from rollwright.errors import CheckpointError
from rollwright.training import recovery_checkpoint as checkpoint
from rollwright.training.recovery_checkpoint import (
    RecoverCheckpoints,
    _checksum,
    check_state,
    random_states,
    read_state,
    restore_random_states,
    write_state,
)


def test_a_nested_state_comes_back(tmp_path):
    state = {
        "weights": {"a.b": torch.randn(2, 3), "c": torch.tensor(4)},
        "list": [1, "two", None, {"x": torch.zeros(0)}],
        "empty": {},
        "flag": True,
        "number": 0.1,
    }
    write_state(tmp_path / "state", state)
    back = read_state(tmp_path / "state")
    assert torch.equal(back["weights"]["a.b"], state["weights"]["a.b"])
    assert back["weights"]["c"].item() == 4
    assert back["list"][:3] == [1, "two", None]
    assert back["list"][3]["x"].shape == (0,)
    assert (back["empty"], back["flag"], back["number"]) == ({}, True, 0.1)


def test_tensors_that_share_memory_are_written_each(tmp_path):
    whole = torch.arange(6.0)
    write_state(tmp_path / "state", {"a": whole[:3], "b": whole[3:], "c": whole})
    assert read_state(tmp_path / "state")["b"].tolist() == [3.0, 4.0, 5.0]


def run(actor, steps, start=0):
    for step in range(start, start + steps):
        batch = {**tiny_batch(seed=step), "role_ids": torch.arange(12) % 2}
        actor.ppo_update(actor.compute_advantages(batch))
        actor.step_lr_scheduler()
        actor.version += 1
    return torch.cat([parameter.detach().flatten() for parameter in actor.model.parameters()])


@pytest.mark.parametrize("recipe", ["grpo", "rae"])
def test_training_goes_on_bit_for_bit(tmp_path, recipe):
    keys = {
        "dtype": torch.float32,
        "recipe": recipe,
        "optimizer": OptimizerConfig(lr=1e-2, lr_scheduler_type="cosine", warmup_steps_proportion=0.3),
    }
    whole = tiny_actor(**keys)
    run(whole, 5)
    expected = run(whole, 3, start=5)
    first = tiny_actor(**keys)
    run(first, 5)
    checkpoints = RecoverCheckpoints(tmp_path / "recover")
    checkpoints.save(5, {"actor": first.state_dict(), "trainer": {"epoch": 1}})
    second = tiny_actor(**keys)
    run(second, 1, start=77)  # whatever it was before
    step, state = checkpoints.load()
    second.load_state_dict(state["actor"])
    assert (step, second.version, state["trainer"]) == (5, 5, {"epoch": 1})
    assert torch.equal(run(second, 3, start=5), expected)
    assert second.estimator_memories == whole.estimator_memories
    assert {len(memory) for memory in whole.estimator_memories.values()} == {1 if recipe == "rae" else 0}


def test_loading_keeps_the_storage_that_an_engine_shares():
    actor, other = tiny_actor(), tiny_actor()
    run(other, 1)
    where = [parameter.data_ptr() for parameter in actor.model.parameters()]
    actor.load_state_dict(other.state_dict())
    assert where == [parameter.data_ptr() for parameter in actor.model.parameters()]
    for mine, theirs in zip(actor.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_of_another_model_is_refused():
    actor = tiny_actor()
    state = actor.state_dict()
    state["weights"]["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="extra"):
        actor.load_state_dict(state)


def test_random_states_come_back(tmp_path):
    write_state(tmp_path / "state", random_states())
    drawn = (random.random(), numpy.random.rand(), torch.rand(1).item())
    restore_random_states(read_state(tmp_path / "state"))
    assert drawn == (random.random(), numpy.random.rand(), torch.rand(1).item())


def test_only_the_newest_are_kept_and_drafts_are_not_seen(tmp_path):
    checkpoints = RecoverCheckpoints(tmp_path / "recover", keep=2)
    assert checkpoints.steps() == []
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        checkpoints.load()
    for step in (1, 2, 12):
        checkpoints.save(step, {"step": step})
    (checkpoints.directory / ".step_00000013.abc.tmp").mkdir()
    assert checkpoints.steps() == [2, 12]
    assert checkpoints.load() == (12, {"step": 12})
    assert checkpoints.load(2) == (2, {"step": 2})
    with pytest.raises(CheckpointError, match="of step 1"):
        checkpoints.load(1)


def test_a_directory_is_replaced_whole_or_not_at_all(tmp_path):
    target = tmp_path / "model"
    with replaced_directory(target) as draft:
        (draft / "old").write_text("old")
    with pytest.raises(FileNotFoundError), replaced_directory(target) as draft:
        (draft / "new").write_bytes((draft / "missing").read_bytes())
    assert [path.name for path in target.iterdir()] == ["old"]
    with replaced_directory(target) as draft:
        (draft / "new").write_text("new")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def checked_state(directory):
    check_state(directory)
    return read_state(directory)


def test_a_damaged_checkpoint_is_named(tmp_path):
    write_state(tmp_path / "state", {"a": torch.zeros(3)})
    (tmp_path / "state" / "state.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"is damaged: state\.safetensors"):
        checked_state(tmp_path / "state")


def flip(path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "checksums.json"])
def test_a_flipped_bit_is_noticed(tmp_path, name):
    write_state(tmp_path / "state", {"weights": torch.arange(4.0), "step": 3, "list": [1.5, "text"]})
    file = tmp_path / "state" / name
    for bit in range(0, 8 * file.stat().st_size, 7):
        flip(file, bit)
        with pytest.raises(CheckpointError, match=r"is damaged|no readable checkpoint"):
            checked_state(tmp_path / "state")
        flip(file, bit)
    assert checked_state(tmp_path / "state")["step"] == 3


def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(checkpoint.logger, "warning", lambda message, *values: warned.append(message % values))
    checkpoints = RecoverCheckpoints(tmp_path / "recover", keep=2)
    for step in (4, 8, 12):
        checkpoints.save(step, {"step": step, "weights": torch.ones(100)})
    flip(checkpoints.path(12) / "state.safetensors", 2000)
    step, state = checkpoints.load()
    assert (step, state["step"]) == (8, 8)
    assert str(checkpoints.path(12)) in warned[0]
    assert "state.safetensors" in warned[0]
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoints.load(12)
    checkpoints.save(10, {"step": 10})
    assert checkpoints.steps() == [8, 10]  # what came after step 8 is no checkpoint of this run any more
    for kept in checkpoints.steps():
        (checkpoints.path(kept) / "state.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"\[8, 10\] are all damaged"):
        checkpoints.load()


def test_a_state_that_is_no_mapping_is_an_error(tmp_path):
    write_state(tmp_path / "state", {"a": 1})
    (tmp_path / "state" / "state.json").write_text("[1, 2]")
    with pytest.raises(CheckpointError, match="state"):
        checked_state(tmp_path / "state")
    checksums = json.loads((tmp_path / "state" / "checksums.json").read_text())
    checksums["state.json"] = _checksum(tmp_path / "state" / "state.json")
    (tmp_path / "state" / "checksums.json").write_text(json.dumps(checksums))
    with pytest.raises(CheckpointError, match=r"state\.json holds a list, not a checkpoint's state; resume from another"):
        checked_state(tmp_path / "state")
