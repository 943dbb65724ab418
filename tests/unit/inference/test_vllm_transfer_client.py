"""Weights over vLLM's transfer engine, against a server that answers in vLLM's shapes (the real one: tests/integration)."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from fastapi import Request
from fastapi.responses import JSONResponse
from server_parts import served
from test_vllm_client import FakeVLLM

from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import VLLMConfig
from rollwright.errors import WeightUpdateError
from rollwright.inference.backends import ServerLaunch
from rollwright.inference.backends.vllm import VLLMBackend, VLLMClient
from rollwright.inference.weights.transfer import WeightUpdateMeta

PATHS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


class Receiving(FakeVLLM):
    """Takes weights by the transfer engine, without looking at them."""

    def __init__(self, **parallel):
        super().__init__()
        self.sections = {"weight_transfer_config": {"backend": "nccl"}, "parallel_config": parallel}
        self.refuses, self.is_open = "", False
        for path in PATHS:
            self.app.post(f"/{path}")(self.control)

    async def control(self, request: Request):
        path = request.url.path.strip("/")
        if path == self.refuses:
            self.calls.append((path, "", {}))
            return JSONResponse({"detail": "no NCCL here"}, status_code=500)
        answer = await super().control(request)
        if path == "start_weight_update" and self.is_open:
            return JSONResponse({"detail": "a weight update is already active"}, status_code=500)
        if path in ("start_weight_update", "finish_weight_update"):
            self.is_open = path == "start_weight_update"
        if path == "finish_weight_update":
            self.version = self.calls[-1][2].get("weight_version", self.version)
        return answer


class Group:
    """Stands for the trainer's half, which needs a GPU."""

    @staticmethod
    def invitation():
        return "the id"

    def __init__(self, place, timeout):
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
        group = client.publication.broadcast.group
        assert group.sent == [["a", "c"], ["b"]] * 2
        assert group.place.world_size == 11
        assert group.place.invitation == "the id"
    for fake, offset in zip(fakes, (1, 9), strict=True):
        calls = [(path, body) for path, _, body in fake.calls if path in (*PATHS, "pause", "resume", "reset_prefix_cache")]
        ((first, joined),) = calls[:1]
        assert first == "init_weight_transfer_engine"
        assert joined["init_info"] == {"nccl_unique_id_b64": "the id", "rank_offset": offset, "world_size": 11}
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


def test_an_update_that_a_trainer_did_not_end_is_ended_first(a_gpu):
    fake = Receiving()
    fake.is_open = True  # as after a trainer that was killed
    with client_of(fake) as client:
        client.update_weights(WeightUpdateMeta("xccl"), version=1, weights={"a": torch.zeros(2)})
        assert client.get_version() == 1
    begun = [path for path, _, _ in fake.calls if path in PATHS[1:]]
    assert begun == [
        "start_weight_update",
        "finish_weight_update",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ]


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
            client.backend.on_connected(client.servers.router.servers[0])
            with pytest.raises(WeightUpdateError, match=said):
                client.update_weights(meta, version=1, weights=weights())
    assert not [path for path, _, _ in fake.calls if path in PATHS]


def test_a_run_that_publishes_by_xccl_starts_servers_that_receive():
    launch = ServerLaunch("127.0.0.1", 1, RolloutConfig(weight_update="xccl"), "model", sections={"vllm": VLLMConfig()})
    command = VLLMBackend.command(launch)
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "nccl"}
    other = ServerLaunch("127.0.0.1", 1, RolloutConfig(), "model", sections={"vllm": VLLMConfig()})
    assert "--weight-transfer-config" not in VLLMBackend.command(other)


def test_the_type_of_the_weights_is_what_the_server_says(a_gpu):
    fake = Receiving()
    with client_of(fake) as client:
        assert client.weight_dtype is None
    fake = Receiving()
    fake.sections["model_config"] = {"logprobs_mode": "processed_logprobs", "dtype": "torch.bfloat16"}
    with client_of(fake) as client:
        assert client.weight_dtype == torch.bfloat16
