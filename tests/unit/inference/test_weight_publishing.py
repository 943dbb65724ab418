from __future__ import annotations

import contextlib
import dataclasses
import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from builtin_models import tiny_model
from transformers import AutoModelForCausalLM

from rollwright.config.allocation import AllocationMode
from rollwright.errors import WeightUpdateError
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.sglang import SGLangClient
from rollwright.inference.request import ModelResponse
from rollwright.inference.weights.files import MANIFEST, content_digest, keep_newest, read_weights, write_files, write_weights
from rollwright.inference.weights.group import buckets
from rollwright.inference.weights.stream import WeightStream, distinct_weights
from rollwright.inference.weights.transfer import MappedWeights, WeightUpdateMeta, shared_directory
from rollwright.training import publish_and_audit as auditing


def some_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(4, 3, generator=generator),
        "b": torch.randn(5, generator=generator).to(torch.bfloat16),
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(3.5),
    }


def test_written_weights_read_back_bit_for_bit_with_their_digest(tmp_path):
    weights = some_weights()
    digest = write_weights(tmp_path / "v1", weights.items(), 1)
    assert json.loads((tmp_path / "v1" / MANIFEST).read_text()) == {"version": 1, "digest": digest}
    read = dict(read_weights(tmp_path / "v1"))
    assert content_digest(read.items()) == digest == content_digest(weights.items())
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in weights.items())
    assert list(tmp_path.iterdir()) == [tmp_path / "v1"]  # nothing is left beside it


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w["a.weight"].view(-1)[5:6].add_(1e-6),
        lambda w: w.update(c=w.pop("b")),
        lambda w: w.update(b=w["b"].view(1, 5)),
        lambda w: w.update(b=w["b"].to(torch.float16)),
        lambda w: w.pop("scalar"),
    ],
)
def test_a_digest_sees_values_names_shapes_and_types(change):
    weights = some_weights()
    before = content_digest(weights.items())
    assert content_digest(reversed(list(weights.items()))) == before
    change(weights)
    assert content_digest(weights.items()) != before


def test_views_and_an_older_version_are_written_rightly(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    write_weights(tmp_path / "v", {"half": whole[:2], "transposed": whole.T}.items(), 1)
    write_weights(tmp_path / "v", {"half": whole[1:], "transposed": whole.T}.items(), 2)
    read = dict(read_weights(tmp_path / "v"))
    assert torch.equal(read["half"], whole[1:])
    assert torch.equal(read["transposed"], whole.T)


def test_large_weights_are_sharded_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr("rollwright.inference.weights.files._FILE_BYTES", 40)
    weights = some_weights()
    digest = write_weights(tmp_path / "v", weights.items(), 1)
    index = json.loads((tmp_path / "v" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights)
    assert content_digest(read_weights(tmp_path / "v")) == digest


def test_a_directory_written_with_a_config_is_a_model_directory(tmp_path):
    model = tiny_model("qwen3")  # tied
    write_weights(tmp_path / "v", distinct_weights(model.state_dict()), 1, model.config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v", dtype=torch.float32)
    ids = torch.arange(10).view(1, 10)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_failed_write_leaves_the_old_version(tmp_path):
    write_weights(tmp_path / "v", some_weights().items(), 1)

    def broken():
        yield "a", torch.zeros(2)
        raise OSError("no space")

    with pytest.raises(WeightUpdateError, match="no space"):
        write_weights(tmp_path / "v", broken(), 2)
    assert set(dict(read_weights(tmp_path / "v"))) == set(some_weights())
    assert list(tmp_path.iterdir()) == [tmp_path / "v"]


def test_weights_that_do_not_fit_are_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=50))
    with pytest.raises(WeightUpdateError, match=r"GB are free there. Free space or choose another path"):
        MappedWeights(tmp_path / "current").write(WeightStream.of(some_weights()), 1)
    assert not list(tmp_path.iterdir())


def test_damaged_and_missing_files_are_said(tmp_path):
    with pytest.raises(WeightUpdateError, match=r"no \*\.safetensors"):
        dict(read_weights(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(WeightUpdateError, match="cannot be read"):
        dict(read_weights(tmp_path))


def test_only_the_newest_versions_are_kept(tmp_path):
    for version in (1, 2, 9, 10):
        (tmp_path / f"v{version}").mkdir()
    (tmp_path / "vocabulary").mkdir()
    keep_newest(tmp_path, "v", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v10", "v9", "vocabulary"]


def test_a_stream_is_written_one_tensor_at_a_time_in_several_files(tmp_path, monkeypatch):
    """What is not yet read does not exist, what was read is not kept, and the files are what a list of tensors gives."""
    weights, alive = {f"w{number}": torch.full((8,), float(number)) for number in range(6)}, []

    def read():
        for name, tensor in weights.items():
            made = tensor.clone()
            alive.append(weakref.ref(made))
            assert sum(ref() is not None for ref in alive) <= 2  # the one that is made, and at most the one before
            yield name, made

    stream = WeightStream([(name, tensor.to("meta")) for name, tensor in weights.items()], read)
    monkeypatch.setattr("rollwright.inference.weights.files._FILE_BYTES", 70)
    digest = write_files(tmp_path, stream)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert digest == content_digest(weights.items()) == content_digest(read_weights(tmp_path))
    wrong = WeightStream([(name, tensor.to("meta")) for name, tensor in weights.items()], lambda: iter([("w1", weights["w1"])]))
    with pytest.raises(WeightUpdateError, match="w1 came where w0"):
        write_files(tmp_path, wrong)


def test_tied_weights_count_once():
    tensor = torch.zeros(3, 2)
    names = [
        name for name, _ in distinct_weights({"embed": tensor, "head": tensor, "part": tensor[:1], "other": tensor.clone()})
    ]
    assert names == ["embed", "part", "other"]


@pytest.mark.parametrize(("limit", "files"), [(4 << 30, 1), (40, 2)])
def test_shared_weights_are_written_in_place(tmp_path, monkeypatch, limit, files):
    """Also those that are too large for one file."""
    monkeypatch.setattr("rollwright.inference.weights.files._FILE_BYTES", limit)
    mapped = MappedWeights(tmp_path / "current")
    mapped.write(WeightStream.of(some_weights(0)), 1)
    inodes = {path: path.stat().st_ino for path in (tmp_path / "current").glob("*.safetensors")}
    assert len(inodes) == files
    mapped.write(WeightStream.of(some_weights(1)), 2)
    again = dict(read_weights(tmp_path / "current"))
    assert {path: path.stat().st_ino for path in (tmp_path / "current").glob("*.safetensors")} == inodes
    assert again.keys() == some_weights(1).keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in some_weights(1).items())
    with pytest.raises(WeightUpdateError, match="other names"):
        mapped.write(WeightStream.of({"new": torch.zeros(2)}), 3)
    mapped.close()
    assert not (tmp_path / "current").exists()


def test_nothing_of_shared_weights_is_left(tmp_path):
    mapped = MappedWeights(shared_directory([tmp_path]))
    mapped.write(WeightStream.of(some_weights()), 1)
    mapped.close()
    assert not list(tmp_path.iterdir())


def test_a_shared_directory_lies_below_what_servers_may_read(tmp_path):
    assert shared_directory([tmp_path]).is_relative_to(tmp_path)
    with pytest.raises(WeightUpdateError, match="not on this host"):
        shared_directory([tmp_path / "elsewhere"])
    free = shared_directory()
    assert free.parent.is_dir()
    free.parent.rmdir()


def test_buckets_hold_their_limit_and_all_tensors():
    named = [(str(size), torch.zeros(size)) for size in (1, 2, 30, 1, 1, 4)]
    parts = list(buckets(named, limit=16))
    assert [[name for name, _ in part] for part in parts] == [["1", "2"], ["30"], ["1", "1"], ["4"]]


def test_ways_are_named():
    meta = WeightUpdateMeta.from_fsdp_xccl(AllocationMode.from_str("sglang:d2p1t4+d8p1t1"))
    assert meta.type == "xccl"
    assert meta.allocation.gen_instance_size == 4
    assert WeightUpdateMeta.from_fsdp_xccl("sglang:d1p1t1").allocation.gen_dp_size == 1
    assert WeightUpdateMeta.from_disk("/x").path == "/x"
    assert WeightUpdateMeta.shared().type == "shared"


def test_memory_copies_into_an_engine_of_this_process():
    engine = BuiltinEngine(tiny_model("qwen3"), kv_cache_bytes=4 << 20)
    with contextlib.closing(_Closing(engine)):
        other = tiny_model("qwen3", seed=5)
        engine.update_weights(WeightUpdateMeta.memory(), version=1, weights=other.state_dict())
        assert engine.get_version() == 1
        assert all(torch.equal(engine.model.state_dict()[name], tensor) for name, tensor in other.state_dict().items())
    with pytest.raises(WeightUpdateError, match="not in this process"):
        SGLangClient().update_weights(WeightUpdateMeta.memory(), version=1, weights={})


class _Closing:
    def __init__(self, engine):
        self.close = engine.destroy


# -- the audit ---------------------------------------------------------------------------------------------------------


def score_of(model):
    """The trainer's log-probabilities as the audit asks for them, by Transformers in float64."""

    @torch.no_grad()
    def score(response):
        ids = torch.tensor([response.input_tokens + response.output_tokens])
        logprobs = torch.log_softmax(model(ids).logits.double() / response.temperature, -1)
        result = torch.zeros(ids.shape, dtype=torch.float64)
        result[:, 1:] = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        return result

    return score


@pytest.fixture(scope="module")
def answered():
    model = tiny_model("qwen3")
    engine = BuiltinEngine(model, kv_cache_bytes=4 << 20, version=2)
    score = score_of(model)
    response = engine.generate([auditing.probe_request(model)])[0]
    yield response, score, model
    engine.destroy()


def test_an_engine_with_the_trainers_weights_passes(answered):
    response, score, _ = answered
    (agreement,) = auditing.audit({"engine 1": response}, score, version=2, tolerance=1e-3)
    assert agreement.tokens == auditing.NEW_TOKENS
    assert agreement.mean < 1e-5
    assert agreement.engine == "engine 1"


def test_an_engine_with_other_weights_is_named(answered):
    response, _, _model = answered
    stale = tiny_model("qwen3")
    with torch.no_grad():
        stale.get_input_embeddings().weight.add_(0.05 * torch.randn_like(stale.get_input_embeddings().weight))
    with pytest.raises(WeightUpdateError, match=r"engine 7.*tied"):
        auditing.audit({"engine 7": response}, score_of(stale), version=2, tolerance=1e-3)


def test_logprobs_at_another_temperature_do_not_pass(answered):
    response, score, _ = answered
    raw = dataclasses.replace(response, temperature=1.0)
    with pytest.raises(WeightUpdateError, match="differ from the trainer's"):
        auditing.audit({"engine": raw}, score, version=2, tolerance=1e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"output_versions": [1] * 16}, "version"),
        ({"output_tokens": [], "output_logprobs": [], "output_versions": []}, "no token"),
        ({"output_logprobs": [float("nan")] * 16}, "finite"),
    ],
)
def test_answers_that_prove_nothing_are_errors(answered, change, said):
    response, score, _ = answered
    broken: ModelResponse = dataclasses.replace(response, **change)
    with pytest.raises(WeightUpdateError, match=said):
        auditing.audit({"engine": broken}, score, version=2, tolerance=1e-3)


def test_a_type_that_files_have_not_is_named(tmp_path):
    with pytest.raises(
        WeightUpdateError, match=r"Weight phase: torch\.complex64 is no type of tensors that files of weights hold"
    ):
        write_weights(tmp_path / "v1", {"phase": torch.ones(2, dtype=torch.complex64)}, 1)
