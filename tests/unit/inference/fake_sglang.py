"""A server that answers in SGLang's shapes and misbehaves on purpose, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from server_parts import served

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.inference.backends.sglang import SGLangClient
from rollwright.inference.request import ModelRequest


class FakeSGLang:
    """The endpoints that a client needs; what it was sent is in ``bodies``."""

    def __init__(self, version="default"):
        self.version, self.bodies, self.calls = version, {}, []
        self.info = {"enable_deterministic_inference": False}
        self.answer = self.default_answer
        self.delay = 0.0
        self.is_held = False  # nothing is answered
        self.context_length = 512
        self.answered = 0
        self.fails: set[str] = set()  # control calls that are answered with 500
        self.app = FastAPI()
        for path in ("pause_generation", "continue_generation", "abort_request", "update_weight_version", "update_weights_from_disk",
                     "init_weights_update_group", "update_weights_from_distributed", "release_memory_occupation",
                     "resume_memory_occupation"):  # fmt: skip
            self.app.post(f"/{path}")(self._recorder(path))
        self.has_session = None  # of weight updates; None: this version of SGLang has no sessions
        for path in ("begin_weight_update", "end_weight_update"):
            self.app.post(f"/{path}")(self._session)
        self.app.get("/health")(lambda: {})
        self.app.get("/server_info")(lambda: self.info)
        self.adapters: dict[str, str] = {}  # path by name
        self.app.post("/load_lora_adapter")(self.load_adapter)
        self.app.post("/unload_lora_adapter")(self.unload_adapter)
        self.app.get("/v1/models")(self.models)
        self.app.get("/model_info")(lambda: {"weight_version": self.version})
        self.app.post("/generate")(self.generate)

    def _recorder(self, path):
        async def route(request: Request):
            body = await request.json()
            self.calls.append(path)
            self.bodies.setdefault(path, []).append(body)
            if path in self.fails:
                return JSONResponse({"success": False, "message": "on purpose"}, status_code=500)
            new = body.get("weight_version") or body.get("new_version")
            if new is not None:
                self.version = new
            return {"success": True, "message": ""}

        return route

    async def _session(self, request: Request):
        path, is_begin = request.url.path.strip("/"), "begin" in request.url.path
        if self.has_session is None:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        self.calls.append(path)
        assert self.has_session is not is_begin, "the scheduler of a real SGLang ends here"
        self.has_session = is_begin
        return {"success": True, "message": "Success"}

    def models(self):
        adapters = [{"id": name, "root": path, "parent": "tiny"} for name, path in self.adapters.items()]
        return {"data": [{"id": "tiny", "max_model_len": self.context_length}, *adapters]}

    async def load_adapter(self, request: Request):
        body = await request.json()
        self.calls.append(f"load {body['lora_name']}")
        self.bodies.setdefault("load_lora_adapter", []).append(body)
        if "load_lora_adapter" in self.fails or body["lora_name"] in self.adapters:
            return JSONResponse({"success": False, "error_message": "on purpose"}, status_code=400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return {"success": True, "error_message": "", "loaded_adapters": self.adapters}

    async def unload_adapter(self, request: Request):
        name = (await request.json())["lora_name"]
        self.calls.append(f"unload {name}")
        del self.adapters[name]
        return {"success": True, "error_message": "", "loaded_adapters": self.adapters}

    def default_answer(self, body):
        tokens = [7, 8, 9]
        return {
            "text": "",
            "output_ids": tokens,
            "meta_info": {
                "id": body["rid"],
                "finish_reason": {"type": "stop", "matched": 9},
                "output_token_logprobs": [[-0.5, token, None] for token in tokens],
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": 3,
                "weight_version": self.version,
                "weight_versions": [{"version": self.version, "start": 0, "end": 3}],
            },
        }

    async def generate(self, request: Request):
        body = await request.json()
        self.bodies.setdefault("generate", []).append(body)
        await asyncio.sleep(self.delay)
        while self.is_held:  # noqa: ASYNC110 - set in another thread
            await asyncio.sleep(0.01)
        asked = len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"]
        if asked > self.context_length:  # SGLang cuts neither prompt nor output by itself
            message = f"Requested token count exceeds the model's maximum context length of {self.context_length} tokens."
            return JSONResponse({"error": {"message": message}}, status_code=400)
        answer = self.answer(body)
        self.answered += 1
        return answer if isinstance(answer, dict) else JSONResponse(answer[1], status_code=answer[0])


@contextlib.contextmanager
def connected(*fakes, **settings):
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(served(fake.app)) for fake in fakes]
        client = SGLangClient(RolloutConfig(**{"setup_timeout": 60, "request_timeout": 60, **settings}), addresses=addresses)
        client.initialize()
        stack.callback(client.destroy)
        yield client


def ask(client, **settings):
    request = {"input_ids": [1, 2], **settings.pop("request", {})}
    return asyncio.run(
        client.agenerate(ModelRequest(gconfig=GenerationHyperparameters(**{"max_new_tokens": 16, **settings}), **request))
    )
