"""Groups over which weights are broadcast, against ranks that join as SGLang's do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from fake_sglang import FakeSGLang, connected
from fastapi import Request
from server_parts import served, tiny_engine

from rollwright.errors import WeightUpdateError
from rollwright.inference.network import find_free_ports
from rollwright.inference.server.application import create_application
from rollwright.inference.server.settings import ServerSettings
from rollwright.inference.weights import group
from rollwright.inference.weights.group import WeightGroup, buckets
from rollwright.inference.weights.transfer import WeightUpdateMeta

SCRIPT = Path(__file__).with_name("weight_peer.py")


class Peer:
    """A process that joins groups by torch's helpers."""

    def __enter__(self) -> Peer:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: [self._answers.put(line) for line in self._process.stdout], daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def __call__(self, order: str, **arguments) -> None:
        self._process.stdin.write(json.dumps({"do": order, **arguments}) + "\n")
        self._process.stdin.flush()
        assert self._answers.get(timeout=300) == '"done"\n'


class SGLangOfPeers(FakeSGLang):
    """A server whose tensor-parallel ranks are processes of their own."""

    def __init__(self, peers):
        self.peers = peers
        super().__init__()
        self.info = {"tp_size": len(peers), "device": "cpu", "dtype": "auto"}

    def _recorder(self, path):
        record = super()._recorder(path)

        async def route(request: Request):
            body = await request.json()
            if path == "init_weights_update_group":
                place = {"address": f"{body['master_address']}:{body['master_port']}", "name": body["group_name"]}
                orders = [
                    {"rank": body["rank_offset"] + rank, "world_size": body["world_size"], **place}
                    for rank in range(len(self.peers))
                ]
                await self.tell("join", orders)
            elif path == "update_weights_from_distributed":
                assert self.has_session is not False, "SGLang takes no bucket without a session"
                described = {name: body[name] for name in ("names", "dtypes", "shapes")}
                is_flat = body.get("load_format") == "flattened_bucket"
                await self.tell("receive", [{**described, "flat": is_flat}] * len(self.peers))
            return await record(request)

        return route

    async def tell(self, order, arguments):
        calls = (asyncio.to_thread(peer, order, **each) for peer, each in zip(self.peers, arguments, strict=True))
        await asyncio.gather(*calls)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(8, 6, generator=generator)
    return {
        "matrix": whole,
        "half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "column": whole[:, 1],  # not contiguous
        "other": torch.randn(3, 4, generator=generator),
        "scalar": torch.tensor(2.5),
    }


def test_ranks_that_join_as_sglangs_do_receive_every_weight(tmp_path):
    """Two servers, one of two ranks: a group whose store has other prefixes than torch's helper makes would not meet."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer()) for _ in range(3)]
        for peer in peers:
            peer("start")  # a request that waited for a process to load torch would be made again
        servers = SGLangOfPeers(peers[:2]), SGLangOfPeers(peers[2:])
        servers[1].has_session = False  # a newer SGLang
        client = stack.enter_context(connected(*servers))
        meta = WeightUpdateMeta("xccl", bucket_bytes=200)
        for version in (1, 2):  # the group is used again
            named = {name: tensor + version for name, tensor in weights().items()}
            client.update_weights(meta, version=version, weights=named)
        bodies = servers[1].bodies
        assert [len(server.bodies["init_weights_update_group"]) for server in servers] == [1, 1]
        assert {body["backend"] for body in bodies["init_weights_update_group"]} == {"gloo"}  # by the servers' device
        sent = bodies["update_weights_from_distributed"][-3:]
        update = ["begin_weight_update", *3 * ["update_weights_from_distributed"], "end_weight_update"]
        assert [call for call in servers[1].calls if call in update] == 2 * update
        assert {body["load_format"] for body in sent} == {"flattened_bucket"}
        assert [set(body["dtypes"]) for body in sent].count({"bfloat16"}) == 1  # the types are not mixed
        for rank, peer in enumerate(peers):
            peer("save", path=str(tmp_path / f"{rank}.pt"))
            received = torch.load(tmp_path / f"{rank}.pt")
            assert set(received) == set(named)
            assert all(torch.equal(received[name], named[name]) for name in named), rank


@pytest.mark.parametrize("flat", [True, False])
def test_serve_model_receives_from_a_trainer_that_joins_as_sglangs_trainers_do(tmp_path, flat):
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(Peer())
        trainer("start")
        engine = stack.enter_context(tiny_engine())
        app = create_application(engine, ServerSettings(), model_path="tiny")
        server = stack.enter_context(httpx.Client(base_url=f"http://{stack.enter_context(served(app))}", timeout=120))
        info = server.get("/server_info").json()
        assert (info["device"], info["dtype"]) == ("cpu", "float32")
        named = {name: torch.randn_like(tensor) for name, tensor in engine.model.named_parameters()}
        torch.save(named, tmp_path / "weights.pt")
        (port,) = find_free_ports(1)
        group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(server.post, "/init_weights_update_group", json={**group, "group_name": "theirs"})
            trainer("join", address=f"127.0.0.1:{port}", rank=0, world_size=2, name="theirs")
            assert joined.result(120).json()["success"], joined.result().text
            described = {
                "names": list(named),
                "dtypes": ["torch.float32"] * len(named),
                "shapes": [list(tensor.shape) for tensor in named.values()],
            }
            body = {**described, "group_name": "theirs", "weight_version": "1"}
            if flat:
                body["load_format"] = "flattened_bucket"
            loaded = pool.submit(server.post, "/update_weights_from_distributed", json=body)
            trainer("send", path=str(tmp_path / "weights.pt"), flat=flat)
            assert loaded.result(120).json()["success"], loaded.result().text
        assert engine.get_version() == 1
        state = engine.model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in named.items())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tp_size": 2, "pp_size": 2}, "pp_size=2: SGLang numbers the ranks of a weight group by rank_offset"),
        ({"tp_size": 2, "dp_size": 2}, "dp_size=2.*enable_dp_attention"),
    ],
)
def test_servers_whose_ranks_would_collide_are_refused_before_anybody_waits(said, message):
    fake = FakeSGLang()
    fake.info = said
    with connected(fake) as client, pytest.raises(WeightUpdateError, match=message):
        client.update_weights(WeightUpdateMeta("xccl"), version=1, weights=weights())
    assert "init_weights_update_group" not in fake.bodies


def test_data_parallel_attention_has_the_ranks_of_its_tensor_parallel_group():
    fake = FakeSGLang()
    fake.info = {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
    with connected(fake) as client:
        assert client.backend.ranks_of(client.servers.router.servers[0], WeightUpdateMeta("xccl")) == 4


@pytest.mark.parametrize(
    ("devices", "has_gpu", "backend"),
    [
        (["cuda", "cuda"], True, "nccl"),
        (["cuda", "cuda"], False, "gloo"),
        (["cuda", "cpu"], True, "gloo"),
        (["cpu"], True, "gloo"),
        ([None], True, "nccl"),  # SGLang's default is a GPU
    ],
)
def test_the_backend_follows_the_servers_devices(monkeypatch, devices, has_gpu, backend):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    fakes = [FakeSGLang() for _ in devices]
    for fake, device in zip(fakes, devices, strict=True):
        fake.info = {} if device is None else {"device": device}
    with connected(*fakes) as client:
        assert client.backend.group_backend(client.servers.router.servers, WeightUpdateMeta("xccl")) == backend
        assert client.backend.group_backend(client.servers.router.servers, WeightUpdateMeta("xccl", backend="gloo")) == "gloo"


def test_a_server_that_refuses_the_group_is_heard_at_once():
    fake = FakeSGLang()
    fake.fails = {"init_weights_update_group"}
    with connected(fake) as client, pytest.raises(WeightUpdateError, match=r"could not be formed.*on purpose"):
        client.update_weights(WeightUpdateMeta("xccl"), version=1, weights=weights())


def test_a_session_that_an_unfinished_update_left_open_is_used_again():
    fake = FakeSGLang()
    fake.has_session = False
    with connected(fake) as client:
        backend, (server,) = client.backend, client.servers.router.servers
        backend.begin_receiving(server, 1)
        backend.begin_receiving(server, 2)  # version 1 did not come to its end
        backend.end_receiving(server, 2)
        backend.begin_receiving(server, 3)
        assert fake.calls[-3:] == ["begin_weight_update", "end_weight_update", "begin_weight_update"]


@pytest.mark.parametrize(
    ("infos", "dtype"),
    [
        ([{"dtype": "bfloat16"}], torch.bfloat16),
        ([{"dtype": "half"}], torch.float16),
        ([{"dtype": "auto", "device": "cuda"}], torch.bfloat16),
        ([{"dtype": "auto", "device": "cpu"}], None),
        ([{}], None),
        ([{"dtype": "bfloat16"}, {"dtype": "float32"}], None),
    ],
)
def test_servers_say_the_type_of_their_weights(infos, dtype):
    fakes = [FakeSGLang() for _ in infos]
    for fake, info in zip(fakes, infos, strict=True):
        fake.info = info
    with connected(*fakes) as client:
        assert client.weight_dtype == dtype
        client.config.weight_dtype = "float16"
        assert client.weight_dtype == torch.float16


def test_buckets_of_one_type_fill_side_by_side():
    named = [(str(index), torch.zeros(4, dtype=[torch.float32, torch.bfloat16][index % 2])) for index in range(8)]
    parts = list(buckets(named, 32, of_one_type=True))
    assert [[name for name, _ in part] for part in parts] == [["0", "2"], ["1", "3", "5", "7"], ["4", "6"]]
    assert [[name for name, _ in part] for part in buckets(named, 48)] == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]


class Hangs:
    """A group in which a rank is gone: what NCCL does then, which neither fails nor ends."""

    def __init__(self):
        self.aborted = threading.Event()

    def broadcast(self, tensor, root):
        return self

    def is_completed(self):
        return self.aborted.is_set()

    def wait(self): ...

    def abort(self):
        self.aborted.set()


def test_a_broadcast_that_never_ends_is_an_error_and_the_group_is_left():
    """NCCL's watchdog would end the trainer instead, so it gets no limit that it could reach."""
    (port,) = find_free_ports(1)
    group = WeightGroup("127.0.0.1", port, 0, 1, "alone", "gloo", timeout=0.5)
    group._group = hangs = Hangs()
    group.device = torch.device("cuda")  # groups on GPUs are aborted
    with pytest.raises(WeightUpdateError, match=r"'alone' did not end within 0.5 s \(rollout.weight_update_timeout\)"):
        group.broadcast(torch.zeros(2))
    assert hangs.aborted.wait(5)
    with pytest.raises(WeightUpdateError, match="was left"):
        group.broadcast(torch.zeros(2))


def test_a_rank_that_takes_no_part_is_not_waited_for_without_end():
    """The same in a real group of two, one of which joins and never receives."""
    (port,) = find_free_ports(1)
    with ThreadPoolExecutor(2) as pool:
        joined = [pool.submit(WeightGroup, "127.0.0.1", port, rank, 2, "two", "gloo", 2.0) for rank in range(2)]
        sender, receiver = (each.result(60) for each in joined)
    with pytest.raises(WeightUpdateError, match="'two'"):
        sender.broadcast(torch.zeros(16_000_000))  # more than fits into the connection's buffers
    receiver.close()


def test_another_nccl_than_the_trainers_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(group, "nccl_version", lambda: "2.28.9")
    for same in ("2.28.9", "2.28.9.1", None):
        group.refuse_other_nccl(same, "the servers")
    with pytest.raises(WeightUpdateError, match=r"NCCL is 2\.28\.9 in the trainer and 2\.27\.5 in the servers") as refused:
        group.refuse_other_nccl("2.27.5", "the servers")
    assert "nvidia-nccl-cu12==2.28.9" in str(refused.value)
    assert "shared or disk" in str(refused.value)


def test_another_interpreter_says_its_nccl(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$NCCL_HERE"\n')
    python.chmod(0o755)
    assert group.nccl_version_of(str(python), {"NCCL_HERE": "2.27.5"}) == "2.27.5"
    assert group.nccl_version_of(str(tmp_path / "none"), {}) is None
    assert group.nccl_version_of(sys.executable, {}) == (group.nccl_version() if torch.cuda.is_available() else None)
