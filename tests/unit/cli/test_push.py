"""``rollwright push`` uploads a checkpoint's files; the Hub is a local server that keeps what it is sent."""

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rollwright.cli.push import push
from rollwright.errors import CheckpointError, ConfigError


class Hub(BaseHTTPRequestHandler):
    """The calls of an upload without large files."""

    def log_message(self, *arguments):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = re.sub(r"\?.*", "", self.path)
        if path == "/api/validate-yaml":  # the card's metadata
            return self.answer(200, {"errors": [], "warnings": []})
        if self.headers.get("Authorization") != "Bearer right":
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            return self.answer(200, {"url": f"{self.server.address}/somebody/adder", "name": "somebody/adder"})
        if path == "/api/models/somebody/adder/preupload/main":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        assert path == "/api/models/somebody/adder/commit/main"
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.answer(200, {"commitUrl": f"{self.server.address}/somebody/adder/commit/1", "commitOid": "1"})

    def do_GET(self):
        self.answer(404, {"error": "not found"})

    def answer(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.made, server.files = [], {}
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", "right")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path):
    final = tmp_path / "run" / "grpo" / "checkpoints" / "final"
    final.mkdir(parents=True)
    for name, content in (("config.json", b"{}"), ("model.safetensors", bytes(range(200))), ("README.md", b"# adder")):
        (final / name).write_bytes(content)
    return tmp_path / "run"


def test_the_final_checkpoint_of_a_run_is_uploaded_with_its_card(hub, run, capsys):
    push(run, "somebody/adder", private=True, revision=None, message="first")
    assert hub.files == {"config.json": b"{}", "model.safetensors": bytes(range(200)), "README.md": b"# adder"}
    assert hub.made[0]["name"] == "adder"
    assert hub.made[0].get("visibility") == "private" or hub.made[0].get("private") is True  # by the version of huggingface_hub
    assert "somebody/adder/commit/1" in capsys.readouterr().out


def test_a_token_that_may_not_write_is_told(hub, run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(CheckpointError, match="HF_TOKEN"):
        push(run, "somebody/adder", private=True, revision=None, message="first")


def test_what_holds_no_checkpoint_or_names_no_repository_is_refused(hub, run, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds none"):
        push(tmp_path / "empty", "somebody/adder", private=True, revision=None, message="first")
    with pytest.raises(CheckpointError, match="no name of a repository"):
        push(run, "no/such/name", private=True, revision=None, message="first")
