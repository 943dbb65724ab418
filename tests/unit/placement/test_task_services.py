"""Clients of an auxiliary model whose server is lost, and started again elsewhere."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rollwright.config.experiment import GRPOConfig
from rollwright.placement.task_services import MovingModelConfig, TaskServices

openai = pytest.importorskip("openai")


@pytest.fixture
def start(tmp_path):
    """Starts a server that says its name, and writes its address down."""
    running = []

    def begin(name):
        class Answer(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                message = {"role": "assistant", "content": f"{name} {self.headers['Authorization']}"}
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                body = json.dumps(
                    {"id": "1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}
                ).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "address").write_text(f"127.0.0.1:{server.server_address[1]}")
        running.append(server)
        return server

    yield begin
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def model(tmp_path):
    settings = {
        "base_url": "http://127.0.0.1:9/v1",
        "api_key": "secret",
        "model": "judge",
        "max_retries": 0,
        "setup_timeout": 30.0,
    }
    return MovingModelConfig(**settings, address_file=str(tmp_path / "address"))


def ask(client):
    answer = client.chat.completions.create(model="judge", messages=[{"role": "user", "content": "?"}])
    return answer.choices[0].message.content


def test_a_server_that_comes_back_elsewhere_is_waited_for_and_asked_there(start, model, tmp_path):
    first = start("first")
    with TaskServices(GRPOConfig(auxiliary_models=[model]), None, tmp_path) as services:
        (client,) = services.auxiliary_models
        assert ask(client) == "first Bearer secret"
        first.shutdown()
        first.server_close()
        later = threading.Timer(0.8, start, ["second"])
        later.start()
        began = time.monotonic()
        assert ask(client) == "second Bearer secret"
        assert time.monotonic() - began > 0.5
        later.join()
        address = (tmp_path / "address").read_text()
        assert str(client.base_url) == f"http://{address}/v1/"  # as asynchronous code takes it
        assert ask(client.with_options(timeout=5.0)) == "second Bearer secret"


def test_one_that_does_not_come_back_is_an_error(start, model, tmp_path):
    start("first").server_close()
    model.setup_timeout = 0.2
    (tmp_path / "address").write_text("127.0.0.1:9")
    with (
        TaskServices(GRPOConfig(auxiliary_models=[model]), None, tmp_path) as services,
        pytest.raises(openai.APIConnectionError),
    ):
        ask(services.auxiliary_models[0])
