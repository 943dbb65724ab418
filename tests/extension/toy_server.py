"""A server of no known kind: it samples from a model by a protocol of its own, and loads weights from a directory.

``python toy_server.py MODEL PORT``; one request is computed at a time.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


class Toy:
    """The model, its version, and a lock that whoever computes holds."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.version = 0
        self.lock = threading.Lock()  # held between pause and resume, too

    @torch.no_grad()
    def sample(self, body: dict) -> dict:
        draw = torch.Generator().manual_seed(body["seed"] or 0)
        ids, logprobs = list(body["prompt"]), []
        with self.lock:
            for _ in range(body["tokens"]):
                logits = self.model(torch.tensor([ids])).logits[0, -1] / (body["temperature"] or 1.0)
                token = int(
                    torch.multinomial(logits.softmax(-1), 1, generator=draw) if body["temperature"] else logits.argmax()
                )
                logprobs.append(float(logits.log_softmax(-1)[token]))
                ids.append(token)
                if token in (body["stop"] or ()):
                    break
            tokens, reason = ids[len(body["prompt"]) :], "length" if len(logprobs) == body["tokens"] else "stop"
            return {"tokens": tokens, "logprobs": logprobs, "version": self.version, "reason": reason}

    def load(self, body: dict) -> None:
        self.model.load_state_dict(load_file(Path(body["directory"]) / "model.safetensors"), strict=False)
        self.version = body["version"]


class Handler(BaseHTTPRequestHandler):
    """One path for each thing that the toy does."""

    toy: Toy

    def do_GET(self) -> None:
        self._answer({"version": self.toy.version})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.path == "/pause":
            self.toy.lock.acquire()
        elif self.path == "/resume":
            self.toy.lock.release()
        elif self.path == "/load":
            self.toy.load(body)
        self._answer(self.toy.sample(body) if self.path == "/sample" else {})

    def _answer(self, answer: dict) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    torch.set_num_threads(1)
    Handler.toy = Toy(sys.argv[1])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
