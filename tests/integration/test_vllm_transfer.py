"""The real vLLM (its CPU build) takes weights by its transfer engine, whose NCCL is Gloo here, and says where it cannot.

Everything but the broadcast itself is vLLM's own: its HTTP paths, the layer-wise reload, the versions. A plugin of vLLM puts a
Gloo engine in the place of the NCCL one, which needs a GPU.
"""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path

import pytest
from real_servers import Trainer, ask, write_model
from test_vllm_server import generate, pytestmark, vllm_config, vllm_server  # noqa: F401 - skipped without the environment

from rollwright.errors import WeightUpdateError
from rollwright.inference.backends.vllm import VLLMBackend
from rollwright.inference.weights.group import WeightGroup
from rollwright.inference.weights.transfer import WeightUpdateMeta

PLUGIN = """
import base64
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore


def register():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory._registry["nccl"] = engine


def engine():
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class GlooEngine(NCCLWeightTransferEngine):
        def init_transfer_engine(self, info):
            place = info.nccl_unique_id_bytes.rstrip(b"\\0").decode()
            address, port, name = place.split("|")
            store = TCPStore(address, int(port), info.world_size, False, timedelta(seconds=60))
            store = PrefixStore("cpu/", PrefixStore(name + "/", PrefixStore(name, store)))
            rank = info.rank_offset + self.parallel_config.rank
            self.model_update_group = ProcessGroupGloo(store, rank, info.world_size, timedelta(seconds=60))

        def update_weights(self, update_info):
            info = self.parse_update_info(update_info)
            for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                self.model_update_group.broadcast(weight, 0).wait()
                self.model.load_weights([(name, weight)])

        def shutdown(self):
            self.model_update_group = None

    return GlooEngine
"""


class GlooHalf:
    """Rank 0 over Gloo, in the place of ``VLLMGroup``; the invitation says where it meets."""

    port = 0

    @staticmethod
    def invitation():
        from rollwright.inference.network import find_free_ports

        GlooHalf.port = find_free_ports(1)[0]
        return base64.b64encode(f"127.0.0.1|{GlooHalf.port}|gloo".encode().ljust(128, b"\0")).decode()

    def __init__(self, place, timeout):
        self.name = place.group_name
        self._group = WeightGroup("127.0.0.1", GlooHalf.port, 0, place.world_size, "gloo", "gloo")

    def send(self, named):
        for _, tensor in named:
            self._group.broadcast(tensor.detach().contiguous())

    def close(self):
        self._group.close()


def with_plugin(directory: Path):
    """The settings of a server that loads the plugin, in each of its processes."""
    (directory / "gloo_engine.py").write_text(PLUGIN)
    metadata = directory / "gloo_engine-0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo-engine\nVersion: 0.0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\ngloo_engine = gloo_engine:register\n")
    config = vllm_config()
    return dataclasses.replace(config, env={**config.env, "PYTHONPATH": str(directory)})


@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_by_the_transfer_engine_and_are_audited(tmp_path, monkeypatch, tied, pytestconfig):
    if tied and pytestconfig.getoption("--seeds") < 2:
        pytest.skip("test_vllm_server.py has this audit by disk; another start of vLLM is part of the long form (--seeds 2)")
    path, plugin = write_model(tmp_path / "model", tied=tied), tmp_path / "plugin"
    plugin.mkdir()
    settings = with_plugin(plugin)
    monkeypatch.setattr("test_vllm_server.vllm_config", lambda: settings)
    monkeypatch.setattr("rollwright.inference.backends.vllm.VLLMGroup", GlooHalf)
    monkeypatch.setattr(VLLMBackend, "group_backend", lambda self, servers, meta: "nccl")
    meta = WeightUpdateMeta("xccl", bucket_bytes=64 << 10)
    with vllm_server(path, tmp_path / "logs", weight_update="xccl") as client:
        trainer = Trainer(path)
        for _ in range(2):
            before = generate(client, ask(4, tokens=12))
            version = trainer.step()
            if tied:  # the CPU build keeps a packed copy of a tied head: the audit finds it, whatever the server says
                with pytest.raises(WeightUpdateError, match="tied embeddings"):
                    trainer.publish(client, meta)
                assert client.backend.read_version(client.servers.router.servers[0]) == str(version)
                return
            assert trainer.publish(client, meta).agreements[0].mean < 1e-4
            after = generate(client, ask(4, tokens=12))
            assert [each.output_tokens for each in before] != [each.output_tokens for each in after]
            assert trainer.check_versions(after) == {version}
        # A trainer that was killed in the middle of an update leaves it open.
        client.servers.ask(client.servers.router.servers[0], "POST", "/start_weight_update", {})
        version = trainer.step()
        assert trainer.publish(client, meta).agreements[0].mean < 1e-4
        assert trainer.check_versions(generate(client, ask(4, tokens=12))) == {version}
        # Without NCCL's place taken a new group is refused before the server waits.
        monkeypatch.undo()
        with pytest.raises(WeightUpdateError, match="needs a GPU in the trainer"):
            trainer.publish(client, dataclasses.replace(meta, group="another"))
        assert trainer.check_versions(generate(client, ask(2, tokens=4))) == {version}
