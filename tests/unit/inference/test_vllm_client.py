"""The vLLM client against a server that answers in vLLM's shapes (the real one: tests/integration/test_vllm_server.py)."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from server_parts import served, small_adapter

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.backends.vllm import VLLMClient
from rollwright.inference.request import ModelRequest
from rollwright.inference.weights import group
from rollwright.inference.weights.transfer import WeightUpdateMeta


class FakeVLLM:
    def __init__(self):
        self.version, self.calls, self.bodies = "default", [], []
        self.mode, self.developer, self.loads = "processed_logprobs", True, True
        self.change, self.more = lambda choice: None, {}
        self.app = FastAPI()
        self.app.get("/health")(lambda: {})
        self.app.get("/weight_info")(self.weight_info)
        self.sections = {}
        self.environment, self.system = {}, {}
        self.app.get("/server_info")(
            lambda: {
                "vllm_config": {"model_config": {"logprobs_mode": self.mode}, **self.sections},
                "vllm_env": self.environment,
                "system_env": self.system,
            }
        )
        self.app.post("/inference/v1/generate")(self.generate)
        self.adapters = []
        self.app.post("/v1/load_lora_adapter")(self.load_adapter)
        self.app.post("/v1/unload_lora_adapter")(self.load_adapter)
        self.app.get("/v1/models")(
            lambda: {"data": [{"id": "tiny", "parent": None}, *({"id": name, "parent": "tiny"} for name in self.adapters)]}
        )
        for path in ("pause", "resume", "collective_rpc", "reset_prefix_cache", "update_weight_version", "abort_requests"):
            self.app.post(f"/{path}")(self.control)

    def weight_info(self):
        return {"weight_version": self.version} if self.developer else JSONResponse({"detail": "Not Found"}, 404)

    async def control(self, request: Request):
        body = await request.json() if await request.body() else {}
        self.calls.append((request.url.path.strip("/"), request.url.query, body))
        if "new_version" in body and self.loads:
            self.version = body["new_version"]
        return {"success": True}

    async def load_adapter(self, request: Request):
        body, path = await request.json(), request.url.path.rpartition("/")[2]
        self.calls.append((path, "", body))
        (self.adapters.append if path == "load_lora_adapter" else self.adapters.remove)(body["lora_name"])
        return PlainTextResponse("Success")

    async def generate(self, request: Request):
        self.bodies.append(await request.json())
        choice = {
            "index": 0,
            "token_ids": [7, 8],
            "logprobs": {"content": [{"token_id": token, "logprob": -0.5, "rank": 1} for token in (7, 8)]},
            "finish_reason": "stop",
            "stop_reason": "</a>",
            "weight_versions": [{"version": self.version, "start": 0, "end": 2}],
        }
        self.change(choice)
        return {"choices": [choice], **self.more}


@contextlib.contextmanager
def connected(fake, **settings):
    with served(fake.app) as address:
        client = VLLMClient(RolloutConfig(setup_timeout=60, **settings), addresses=[address])
        try:
            client.initialize()
            yield client
        finally:
            client.destroy()


def ask(client, **settings):
    request = {"input_ids": [1, 2], **settings.pop("request", {})}
    return asyncio.run(client.agenerate(ModelRequest(gconfig=GenerationHyperparameters(**settings), **request)))


def test_requests_and_answers():
    fake = FakeVLLM()
    with connected(fake) as client:
        response = ask(client, temperature=0.7, stop=["</a>"], seed=4)
        (body,) = fake.bodies
        assert body["token_ids"] == [1, 2]
        assert body["sampling_params"]["seed"] == 4
        assert "stop_token_ids" not in body["sampling_params"]
        assert body["sampling_params"]["logprobs"] == 0
        assert body["sampling_params"]["stop"] == ["</a>"]
        assert response.output_tokens == [7, 8]
        assert response.output_versions == [0, 0]
        assert response.stop_match == "</a>"
        assert not response.logprobs_shifted


def test_an_adapter_is_loaded_under_a_name_that_requests_give_as_their_model(tmp_path):
    fake = FakeVLLM()
    with connected(fake) as client:
        assert "model" not in (ask(client), fake.bodies[-1])[1]
        for version in (1, 2):
            client.update_weights(WeightUpdateMeta.from_disk(tmp_path), version=version, weights=small_adapter())
        loads = [body for path, _, body in fake.calls if path == "load_lora_adapter"]
        assert [Path(body["lora_path"]).name for body in loads] == [body["lora_name"] for body in loads]
        assert ask(client).output_versions == [2, 2]  # the server speaks of its base
        assert fake.bodies[-1]["model"] == loads[-1]["lora_name"]
        assert not {path for path, *_ in fake.calls} & {"pause", "resume", "collective_rpc", "reset_prefix_cache"}
        assert fake.version == "0"


def test_shifted_logprobs_are_refused_or_flagged():
    fake = FakeVLLM()
    with connected(fake) as client, pytest.raises(EngineError, match="top_p"):
        ask(client, top_p=0.9)
    with connected(FakeVLLM(), accept_shifted_logprobs=True) as client:
        assert ask(client, top_p=0.9).logprobs_shifted


@pytest.mark.parametrize("name", ["position_ids", "branch_ids"])
def test_isolated_branches_are_refused(name):
    with connected(FakeVLLM()) as client, pytest.raises(EngineError, match=name):
        ask(client, request={name: [0, 1]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda choice: choice.update(weight_versions=None), "weight_versions"),
        (lambda choice: choice["logprobs"]["content"].pop(), "other tokens"),
        (lambda choice: choice["logprobs"]["content"][0].update(logprob=-9999.0), "finite"),
        (lambda choice: choice["weight_versions"][0].update(version="other"), "other"),
    ],
)
def test_answers_without_the_truth_are_errors(change, said):
    fake = FakeVLLM()
    fake.change = change
    with connected(fake) as client, pytest.raises(EngineError, match=said):
        ask(client)


def test_a_server_in_another_mode_is_refused_with_the_flag_to_set():
    fake = FakeVLLM()
    fake.mode = "raw_logprobs"
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"), connected(fake):
        pass
    fake = FakeVLLM()
    fake.developer = False
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"), connected(fake):
        pass


@pytest.mark.parametrize(
    ("policy", "mode", "reset"), [("recompute", "keep", "true"), ("keep", "keep", "false"), ("wait", "wait", "false")]
)
def test_an_update_pauses_reloads_labels_and_resets(policy, mode, reset, tmp_path):
    fake = FakeVLLM()
    with connected(fake, on_weight_update=policy) as client:
        fake.calls.clear()
        client.publication.update_from_disk(str(tmp_path), 3)
        assert [(name, query) for name, query, _ in fake.calls] == [
            ("pause", f"mode={mode}"),
            ("collective_rpc", ""),
            ("update_weight_version", ""),
            ("reset_prefix_cache", f"reset_running_requests={reset}"),
            ("resume", ""),
        ]
        assert fake.calls[1][2] == {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
        assert client.get_version() == 3


def test_a_server_that_does_not_take_the_version_is_an_error(tmp_path):
    fake = FakeVLLM()
    with connected(fake) as client:
        fake.loads = False
        with pytest.raises(WeightUpdateError, match="after an update to 3"):
            client.publication.update_from_disk(str(tmp_path), 3)
        assert client.get_version() == 0


def test_seeds_are_kept_from_a_server_that_they_could_end():
    """The CPU build rewinds a seeded generator after a partial prefill, which CPU generators cannot do."""
    fake = FakeVLLM()
    fake.sections = {"device_config": {"device": "cpu"}, "scheduler_config": {"enable_chunked_prefill": True}}
    with connected(fake) as client:
        assert ask(client, request={"seed": 7}).seed is None
        assert "seed" not in fake.bodies[0]["sampling_params"]
        with pytest.raises(EngineError, match=r"gconfig\.seed=7.*--no-enable-chunked-prefill"):
            ask(client, seed=7)
    fake = FakeVLLM()
    fake.sections = {"device_config": {"device_type": "cpu"}, "scheduler_config": {"enable_chunked_prefill": False}}
    with connected(fake) as client:
        assert ask(client, seed=7).seed == 7
        assert fake.bodies[0]["sampling_params"]["seed"] == 7


def test_a_deterministic_run_wants_servers_in_their_batch_invariant_mode():
    fake = FakeVLLM()
    for said, expected in (({}, False), ({"VLLM_BATCH_INVARIANT": True}, True)):
        fake.environment = said
        with connected(fake) as client:
            assert client.is_batch_invariant is expected


def test_a_server_whose_nccl_is_another_than_the_trainers_takes_no_broadcast(monkeypatch):
    fake = FakeVLLM()
    fake.sections = {"weight_transfer_config": {"backend": "nccl"}}
    fake.system = {"pip_packages": "[pip3] numpy==2.4.0\n[pip3] nvidia-nccl-cu12==2.27.5\n[pip3] torch==2.13.0"}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(group, "nccl_version", lambda: "2.28.9")
    with connected(fake) as client, pytest.raises(WeightUpdateError, match=r"2\.27\.5 in the vLLM server at 127"):
        client.backend.group_backend(client.servers.router.servers, WeightUpdateMeta("xccl"))
