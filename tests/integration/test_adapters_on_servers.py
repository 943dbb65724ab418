"""``rollwright serve-model`` with LoRA adapters: every version is the trainer's, also after a kill."""

from __future__ import annotations

import asyncio

import pytest
import torch
from real_servers import AdapterTrainer, ask, gather_while, served_model, write_model
from test_lost_servers import kill, started_again, wait_in_service

from rollwright.inference.weights.adapter import AdapterRoom
from rollwright.inference.weights.transfer import WeightUpdateMeta

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOM = AdapterRoom(count=3, rank=4)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_every_version_is_the_trainers_also_after_a_kill(model_path, tmp_path):
    with served_model(model_path, tmp_path / "logs", adapters=ROOM, max_head_offpolicyness=2) as (servers, client):
        trainer, agreements = AdapterTrainer(model_path), []

        def publish(meta: WeightUpdateMeta | None = None):
            trainer.step()
            agreements.extend(trainer.publish(client, meta).agreements)

        publish()
        responses = asyncio.run(
            gather_while(client, ask(8, tokens=60), publish, seen=lambda each: each.output_versions[0] == 1)
        )
        publish(WeightUpdateMeta.from_disk(servers.weights_root / "disk"))
        responses += asyncio.run(gather_while(client, ask(4, tokens=8, seed=100), lambda: None))
        assert all(len(set(response.output_versions)) == 1 for response in responses)
        assert trainer.check_versions(responses, TOLERANCE) >= {1, 2, trainer.version}
        assert [agreement.largest < TOLERANCE for agreement in agreements] == [True] * trainer.version
        client.servers.check_interval, client.servers.strikes = 0.5, 1
        kill(servers, 0)
        wait_in_service(client, 0)
        with started_again(servers, 0, tmp_path):
            wait_in_service(client, 1)
            kept = client.weights.adapters._kept
            assert len(kept) == 3
            again = ask(3, tokens=8, seed=200)
            for request, adapter in zip(again, kept, strict=True):
                request.lora_name = adapter.name
            for response, adapter in zip(asyncio.run(answered(client, again)), kept, strict=True):
                difference = torch.tensor(response.output_logprobs) - trainer.expected(response, adapter.version)
                assert difference.abs().max() < TOLERANCE


async def answered(client, requests):
    async with asyncio.timeout(120):
        return await asyncio.gather(*map(client.agenerate, requests))
