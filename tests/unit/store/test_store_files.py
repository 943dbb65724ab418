"""File storage, the Parquet export, and which store a config opens."""

import json
import math
from dataclasses import fields

import pytest
import torch

pytest.importorskip("sqlalchemy")

from hypothesis import given
from hypothesis import strategies as st

from rollwright.config.modes import StoreConfig
from rollwright.errors import ConfigError, StoreError
from rollwright.experience.experience import Experience, ExperienceId
from rollwright.store import ExperienceStore, FileStore, Sampling, open_store
from rollwright.store.file_store import document_experience, experience_document


def experience(marker: int = 0, **fields) -> Experience:
    return Experience(
        tokens=[1, 2, marker],
        prompt_length=1,
        logprobs=[-0.5, -1.25],
        versions=[3, 4],
        reward=0.5,
        info={"n": marker},
        **fields,
    )


@given(
    st.lists(st.integers(0, 2**31), min_size=2, max_size=8),
    st.floats(allow_nan=False, allow_infinity=False, width=32) | st.none(),
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.lists(st.booleans(), max_size=2), max_size=3),
)
def test_documents_lose_nothing(tokens, reward, info):
    written = Experience(tokens=tokens, prompt_length=1, reward=reward, info=info, eid=ExperienceId(task="t", run=2))
    document = json.loads(json.dumps(experience_document(written)))
    assert document_experience(document, "line 1") == written


def test_documents_refuse_what_they_cannot_hold():
    torch = pytest.importorskip("torch")
    with pytest.raises(StoreError, match=r"store\.type=sql"):
        experience_document(experience(multi_modal_inputs={"pixels": torch.zeros(2)}))
    with pytest.raises(StoreError, match=r"line 3: an experience has no field 'rewrad'"):
        document_experience({"tokens": [1], "rewrad": 1}, "line 3")


def test_groups_are_read_in_the_order_of_the_lines(tmp_path):
    with FileStore(tmp_path / "e.jsonl") as store:
        assert store.sample(groups=1) is None
        groups = [[experience(1), [experience(2), experience(3)]], [experience(4)], [experience(5)]]
        assert [store.append(group, ordinal=index) for index, group in enumerate(groups)] == [3, 1, 1]
        assert store.append(groups[0], ordinal=0) == 0
        batch = store.sample(groups=2)
        assert [each.info["n"] for each in batch.experiences] == [1, 2, 3, 4]
        assert [(each.ordinal, each.version) for each in batch] == [(0, 3), (1, 3)]
        assert store.sample(groups=2) is None
        assert [each.info["n"] for each in store.sample(groups=2, partial_batch=True).experiences] == [5]
        assert [group.name for group in store.groups()] == ["task/0", "task/1", "task/2"]


def test_rows_are_counted_in_whole_groups(tmp_path):
    with FileStore(tmp_path / "e.jsonl") as store:
        for index in range(3):
            store.append([experience(), experience()], ordinal=index)
        assert [each.ordinal for each in store.sample(experiences=3)] == [0, 1]
        assert store.sample(experiences=3) is None


def test_lines_written_by_hand_are_experiences(tmp_path):
    (tmp_path / "e.jsonl").write_text('{"tokens": [5, 6], "prompt_length": 1, "reward": 1.0}\n\n{"tokens": [7, 8]}\n{"tok')
    store = FileStore(tmp_path / "e.jsonl")
    assert [each.tokens.tolist() for group in store.groups() for each in group.experiences] == [[5, 6], [7, 8]]
    (tmp_path / "e.jsonl").write_text('{"tokens": [5, 6]}\nnonsense\n')
    with pytest.raises(StoreError, match="line 2 of"):
        list(store.groups())


def test_what_a_killed_writer_left_is_cut_off(tmp_path):
    path = tmp_path / "e.jsonl"
    with FileStore(path) as store:
        store.append([experience(1)], ordinal=0)
    path.write_bytes(path.read_bytes() + b'{"group": "task/1", "exper')
    with FileStore(path) as store:
        assert store.append([experience(1)], ordinal=0) == 0
        assert store.append([experience(2)], ordinal=1) == 1
        assert [each.info["n"] for each in store.sample(groups=2).experiences] == [1, 2]


def test_one_writer(tmp_path):
    with FileStore(tmp_path / "e.jsonl") as first, FileStore(tmp_path / "e.jsonl") as second:
        first.append([experience()], ordinal=0)
        with pytest.raises(StoreError, match="several explorers need"):
            second.append([experience()], ordinal=1)
        assert second.sample(groups=1) is not None


def test_a_restarted_reader_goes_back_to_its_checkpoint(tmp_path):
    with FileStore(tmp_path / "e.jsonl") as store:
        for index in range(4):
            store.append([experience(index)], ordinal=index)
        store.sample(groups=1)
        store.commit("step-1")
        store.sample(groups=2)
        store.commit("step-2")
        with pytest.raises(StoreError, match="already"):
            store.commit("step-2")
    with FileStore(tmp_path / "e.jsonl") as store:
        with pytest.raises(StoreError, match=r"call recover\(checkpoint\)"):
            store.sample(groups=1)
        store.recover("step-1")
        assert [each.ordinal for each in store.sample(groups=3)] == [1, 2, 3]
        with pytest.raises(StoreError, match="knows no checkpoint 'step-2'"):
            store.recover("step-2")
        store.recover(None)
        assert [each.ordinal for each in store.sample(groups=1)] == [0]


def test_export_to_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    with ExperienceStore("sqlite://") as store:
        store.append([experience(1), experience(2, truncated=True)], ordinal=0)
        store.append([Experience(tokens=[9], chosen=[1, 2], rejected=[3], reward=math.inf)], name="preference")
        store.append([experience(3)], ordinal=1, index=0, group_size=2)
        store.sample(groups=1)
        assert store.export_parquet(tmp_path / "out" / "e.parquet") == 3
        assert store.export_parquet(tmp_path / "all.parquet", partial=True) == 4
    rows = parquet.read_table(tmp_path / "out" / "e.parquet").to_pylist()
    assert [row["group"] for row in rows] == ["task/0", "task/0", "preference"]
    assert rows[1]["tokens"] == [1, 2, 2]
    assert rows[1]["logprobs"] == [-0.5, -1.25]
    assert (rows[1]["truncated"], rows[1]["uses"], rows[1]["group_version"]) == (True, 1, 3)
    assert json.loads(rows[1]["info"]) == {"n": 2}
    assert (rows[2]["chosen"], rows[2]["rejected"], rows[2]["ordinal"]) == ([1, 2], [3], None)


def test_the_config_says_which_store(tmp_path):
    with open_store(StoreConfig(), tmp_path, run="r") as store:
        assert isinstance(store, ExperienceStore)
    assert (tmp_path / "experiences.db").exists()
    with open_store(StoreConfig(type="queue", url=f"sqlite:///{tmp_path}/q.db"), tmp_path, run="r") as store:
        assert isinstance(store, ExperienceStore)
    with open_store(StoreConfig(type="file"), tmp_path, run="r") as store:
        assert isinstance(store, FileStore)
        assert store.path == tmp_path / "experiences.jsonl"


@pytest.mark.parametrize(
    "config",
    [
        StoreConfig(type="queue", order="freshest"),
        StoreConfig(type="file", uses=2),
        StoreConfig(type="file", url="sqlite:///x.db"),
        StoreConfig(type="tape"),
    ],
)
def test_contradictions_are_refused(tmp_path, config):
    with pytest.raises(ConfigError, match=r"store\."):
        open_store(config, tmp_path, run="r")


def test_sampling_from_the_config():
    config = StoreConfig(order="priority", uses=None, priority_fn_args={"decay": 3.0}, cooldown_seconds=2.0)
    assert Sampling.from_config(config, seed=7) == Sampling(
        order="priority", uses=None, priority_fn_args={"decay": 3.0}, cooldown_seconds=2.0, seed=7
    )
    with pytest.raises(ConfigError, match="for ever"):
        Sampling(uses=None)


def test_uses_without_end():
    with ExperienceStore("sqlite://") as store:
        store.append([experience()], ordinal=0)
        sampling = Sampling(order="priority", uses=None)
        assert [store.sample(groups=1, sampling=sampling).groups[0].uses for _ in range(5)] == [1, 2, 3, 4, 5]
        store.commit("a")
        assert store.forget_used(sampling=sampling, keep_checkpoints=1) == 0


@pytest.mark.parametrize(
    "name", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
)
def test_stored_bytes_are_safetensors_and_repeat(name):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load

    from rollwright.experience.packed import pack_bytes, unpack_bytes

    dtype = getattr(torch, name)
    tensors = {
        "matrix": torch.arange(6).view(2, 3).t().to(dtype),  # not contiguous
        "number": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, dtype=dtype),
        "odd": torch.ones(3, dtype=torch.bool),
    }
    data = pack_bytes(tensors, {"text": "é"})
    assert data == pack_bytes(tensors, {"text": "é"})
    read = load(data)
    assert all(read[key].dtype == tensors[key].dtype and torch.equal(read[key], tensors[key]) for key in tensors)
    assert unpack_bytes(data)[1] == {"text": "é"}


def test_every_field_of_an_experience_is_exported(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    whole = Experience(
        tokens=[1, 2, 3],
        prompt_length=1,
        reward=0.5,
        logprobs=[-0.5, -1.0],
        action_mask=[True, False],
        versions=[4, 4],
        token_rewards=[0.0, 1.0],
        advantages=[0.25, 0.5],
        returns=[1.0, 2.0],
        temperature=0.75,
        truncated=False,
        logprobs_shifted=True,
        info={"a": 1},
        metrics={"b": 2.0},
        prompt_text="p",
        response_text="r",
        messages=[{"role": "user", "content": "q"}],
        tools=[{"type": "function"}],
        chosen=[5],
        rejected=[6, 7],
        chosen_messages=[{"role": "assistant", "content": "c"}],
        rejected_messages=[{"role": "assistant", "content": "d"}],
        position_ids=[0, 1, 2],
        branch_ids=[0, 0, 1],
        other_context=[False, False, True],
        agent="policy",
        role="first",
        environment="nim",
        trainable=True,
        turn_ids=2,
        routed_experts=torch.tensor([[1, 2], [3, 1], [0, 0]], dtype=torch.uint8),
    )
    with ExperienceStore("sqlite://") as store:
        store.append([whole])
        store.export_parquet(tmp_path / "e.parquet")
    (row,) = parquet.read_table(tmp_path / "e.parquet").to_pylist()
    for field in fields(Experience):
        value = getattr(whole, field.name)
        if field.name in ("eid", "multi_modal_inputs"):
            continue
        assert value is not None, f"{field.name} is not set in this test"
        written = row[field.name]
        if isinstance(value, torch.Tensor):
            assert written == value.tolist(), field.name
        else:
            assert (json.loads(written) if isinstance(value, list | dict) else written) == value, field.name
    assert row["eid"] == str(whole.eid)
    read = document_experience(json.loads(json.dumps(experience_document(whole))), "line 1")
    assert read.routed_experts.dtype == torch.int16
    assert torch.equal(read.routed_experts, whole.routed_experts.to(torch.int16))
