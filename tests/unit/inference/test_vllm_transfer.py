"""Weights over vLLM's transfer engine, against a server that answers in vLLM's shapes, and its meeting point."""

from __future__ import annotations

import contextlib
import ctypes
import json
import pickle
import sys
import threading
import types
from datetime import timedelta

import pytest
import torch
from fastapi import Request
from fastapi.responses import JSONResponse
from server_parts import served
from test_vllm_client import FakeVLLM
from torch._C._distributed_c10d import TCPStore

from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import VLLMConfig
from rollwright.errors import WeightUpdateError
from rollwright.inference.backends import ServerLaunch
from rollwright.inference.backends.vllm import VLLMClient
from rollwright.inference.network import find_free_ports
from rollwright.inference.weights import vllm_group
from rollwright.inference.weights.broadcast import GroupPlace
from rollwright.inference.weights.ways import WeightUpdateMeta

PATHS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


class Receiving(FakeVLLM):
    """Takes weights by the transfer engine, without looking at them."""

    def __init__(self, **parallel):
        super().__init__()
        self.sections = {"weight_transfer_config": {"backend": "nccl"}, "parallel_config": parallel}
        self.refuses = ""
        for path in PATHS:
            self.app.post(f"/{path}")(self.control)

    async def control(self, request: Request):
        path = request.url.path.strip("/")
        if path == self.refuses:
            self.calls.append((path, "", {}))
            return JSONResponse({"detail": "no NCCL here"}, status_code=500)
        answer = await super().control(request)
        if path == "finish_weight_update":
            self.version = self.calls[-1][2]["weight_version"]
        return answer


class Group:
    """Stands for the trainer's half, which needs a GPU."""

    def __init__(self, place):
        self.name, self.sent, self.place = place.group_name, [], place

    def send(self, named):
        self.sent.append([name for name, _ in named])

    def close(self):
        pass


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("rollwright.inference.backends.vllm.VLLMGroup", Group)


@contextlib.contextmanager
def client_of(*fakes):
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(served(fake.app)) for fake in fakes]
        client = VLLMClient(RolloutConfig(setup_timeout=60, request_timeout=60), addresses=addresses)
        client.initialize()
        stack.callback(client.destroy)
        yield client


def weights():
    return {"a": torch.zeros(4, 2), "b": torch.zeros(3, dtype=torch.bfloat16), "c": torch.zeros(2)}


def test_an_update_is_begun_sent_in_buckets_and_finished_with_its_version(a_gpu):
    fakes = Receiving(world_size=4, data_parallel_size=2), Receiving(tensor_parallel_size=2, pipeline_parallel_size=1)
    with client_of(*fakes) as client:
        meta = WeightUpdateMeta("xccl", bucket_bytes=40)
        for version in (1, 2):
            client.update_weights(meta, version=version, weights=weights())
            assert client.get_version() == version
        group = client._group
        assert group.sent == [["a", "c"], ["b"]] * 2
        assert group.place.world_size == 11
    for fake, offset in zip(fakes, (1, 9), strict=True):
        calls = [(path, body) for path, _, body in fake.calls if path in (*PATHS, "pause", "resume", "reset_prefix_cache")]
        ((first, joined),) = calls[:1]
        assert first == "init_weight_transfer_engine"
        assert set(joined["init_info"]) == {"master_address", "master_port", "rank_offset", "world_size"}
        assert joined["init_info"]["rank_offset"] == offset
        names = [path for path, _ in calls[1:]]
        assert names[: len(names) // 2] == names[len(names) // 2 :]  # the group is used again
        assert names[:7] == [
            "pause",
            "start_weight_update",
            "update_weights",
            "update_weights",
            "finish_weight_update",
            "reset_prefix_cache",
            "resume",
        ]
        told = [body["update_info"] for path, body in calls if path == "update_weights"][:2]
        assert told[0] == {"names": ["a", "c"], "dtype_names": ["float32"] * 2, "shapes": [[4, 2], [2]]}
        assert told[1] == {"names": ["b"], "dtype_names": ["bfloat16"], "shapes": [[3]]}
        assert [body for path, body in calls if path == "finish_weight_update"] == [
            {"weight_version": "1"},
            {"weight_version": "2"},
        ]


def test_a_server_that_cannot_join_is_named(a_gpu):
    fake = Receiving()
    fake.refuses = "init_weight_transfer_engine"
    with client_of(fake) as client, pytest.raises(WeightUpdateError, match=r"did not join the group.*no NCCL here"):
        client.update_weights(WeightUpdateMeta("xccl"), version=1, weights=weights())


def test_where_it_cannot_work_it_is_refused_before_anybody_waits(monkeypatch):
    fake = Receiving()
    with client_of(fake) as client:
        for has_gpu, transfer, meta, said in [
            (False, "nccl", WeightUpdateMeta("xccl"), "needs a GPU in the trainer"),
            (True, "nccl", WeightUpdateMeta("xccl", backend="gloo"), "over NCCL alone"),
            (True, None, WeightUpdateMeta("xccl"), "--weight-transfer-config"),
        ]:
            monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
            fake.sections["weight_transfer_config"] = {"backend": transfer}
            client.on_connected(client.router.servers[0])
            with pytest.raises(WeightUpdateError, match=said):
                client.update_weights(meta, version=1, weights=weights())
    assert not [path for path, _, _ in fake.calls if path in PATHS]


def test_a_run_that_publishes_by_xccl_starts_servers_that_receive():
    launch = ServerLaunch("127.0.0.1", 1, RolloutConfig(weight_update="xccl"), "model", sections={"vllm": VLLMConfig()})
    command = VLLMClient.command(launch)
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "nccl"}
    other = ServerLaunch("127.0.0.1", 1, RolloutConfig(), "model", sections={"vllm": VLLMConfig()})
    assert "--weight-transfer-config" not in VLLMClient.command(other)


def test_the_type_of_the_weights_is_what_the_server_says(a_gpu):
    fake = Receiving()
    with client_of(fake) as client:
        assert client.weight_dtype is None
    fake = Receiving()
    fake.sections["model_config"] = {"logprobs_mode": "processed_logprobs", "dtype": "torch.bfloat16"}
    with client_of(fake) as client:
        assert client.weight_dtype == torch.bfloat16


def test_nccls_id_is_published_as_vllm_reads_it(monkeypatch):
    """A rank of vLLM reads one key of the store, and unpickles a ctypes structure of its own."""
    module, name = vllm_group._ID_CLASS

    class NcclUniqueId(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_byte * 128)]

    NcclUniqueId.__module__, NcclUniqueId.__qualname__ = module, name
    stand_in = types.ModuleType(module)
    setattr(stand_in, name, NcclUniqueId)
    monkeypatch.setitem(sys.modules, module, stand_in)
    parts = module.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
    unique_id = bytes(range(128))
    read = pickle.loads(vllm_group.pickled_id(unique_id))  # noqa: S301
    assert isinstance(read, NcclUniqueId)
    assert bytes(read) == unique_id
    assert pickle.loads(pickle.dumps(read)).internal[5] == 5  # noqa: S301
    with pytest.raises(WeightUpdateError, match="64 bytes"):
        vllm_group.pickled_id(bytes(64))

    (port,) = find_free_ports(1)
    got = []

    def rank_of_vllm():
        store = TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=30), use_libuv=False)
        got.append(store.get("broadcast_from/0/0"))

    thread = threading.Thread(target=rank_of_vllm)
    thread.start()
    store = vllm_group.meeting_point(GroupPlace("127.0.0.1", port, 0, 2, "g", "nccl"), 30)
    store.set(vllm_group.ID_KEY, vllm_group.pickled_id(unique_id))
    thread.join(30)
    assert bytes(pickle.loads(got[0])) == unique_id  # noqa: S301


def test_servers_that_do_not_come_are_named():
    (port,) = find_free_ports(1)
    with pytest.raises(WeightUpdateError, match="The 2 ranks of the vLLM servers did not come"):
        vllm_group.meeting_point(GroupPlace("127.0.0.1", port, 0, 3, "g", "nccl"), 1)
