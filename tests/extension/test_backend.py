"""An inference backend from a file of the user's own: a run starts its servers, publishes to them by disk, and audits them."""

import json
from pathlib import Path

import pytest

from rollwright import BACKENDS, ConfigError, RemoteClient, ServerBackend

TOY = """
import sys

from rollwright import BACKENDS, ModelResponse, ParameterTable, ServerBackend


@BACKENDS.register("toy")
class Toy(ServerBackend):
    kind, generate_path, transports, needs_gpu = "toy", "/sample", ("disk",), False
    parameters = ParameterTable({"max_new_tokens": "tokens", "temperature": "temperature", "stop_token_ids": "stop", "seed": "seed"})

    @classmethod
    def command(cls, launch):
        return [sys.executable, "SERVER", launch.model_path, str(launch.port)]

    def payload(self, request, wire_id, server):
        return {"prompt": request.input_ids, **self.parameters.sampling_params(request.gconfig, request.effective_seed)}

    def response(self, request, data, version_when_sent):
        versions = [data["version"]] * len(data["tokens"])
        return ModelResponse(request.input_ids, data["tokens"], data["logprobs"], versions, data["reason"])

    def pause_server(self, server): self.ask(server, "POST", "/pause")

    def resume_server(self, server): self.ask(server, "POST", "/resume")

    def read_version(self, server): return self.ask(server, "GET", "/version")["version"]

    def load_from_disk(self, server, directory, version, digest): self.ask(server, "POST", "/load", {DIRECTORY, "version": version})
""".replace("SERVER", str(Path(__file__).with_name("toy_server.py"))).replace("DIRECTORY", '"directory": directory')


@pytest.fixture(autouse=True)
def forgotten():
    """The name is free again for the next test's file."""
    yield
    BACKENDS._entries.pop("toy", None)


@pytest.mark.timeout(600)
def test_a_run_samples_from_the_users_servers(run_with, tmp_path):
    weights = tmp_path / "weights"
    ways = ["stages.grpo.rollout.weight_update=disk", f"stages.grpo.rollout.weight_update_path={weights}"]
    directory, _ = run_with(TOY, "stages.grpo.rollout.backend=toy", *ways)
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    audited = [step["actor/logprob_difference/probe"] for step in steps if "actor/logprob_difference/probe" in step]
    assert audited
    assert max(audited) < 1e-4
    assert sorted(path.name for path in weights.iterdir()) == ["v1", "v2"]
    assert (directory / "logs" / "toy-0.log").exists()


def test_the_older_name_of_the_base_class_works():
    assert RemoteClient is ServerBackend


def test_the_older_name_of_an_attribute_is_refused():
    with pytest.raises(ConfigError, match="`transports` now"):
        type("OldBackend", (ServerBackend,), {"ways": ("disk",)})


def test_what_the_server_cannot_do_is_refused_by_name(run_with):
    _, output = run_with(TOY, "stages.grpo.rollout.backend=toy", "stages.grpo.rollout.weight_update=shared", succeeds=False)
    assert "The toy servers take weights by disk: set rollout.weight_update" in output
    _, output = run_with(TOY, "stages.grpo.rollout.backend=top", succeeds=False)
    assert "rollout.backend" in output
    assert "did you mean 'toy'" in output.lower()
