"""The real vLLM (its CPU build): sampling, log-probabilities, weights that change under requests, and where it is wrong.

``scripts/make_vllm_env.sh`` builds the environment; ``ROLLWRIGHT_VLLM_PYTHON`` names another one's interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from pathlib import Path

import psutil
import pytest
import torch
from real_servers import Trainer, ask, write_model

from rollwright import PPOTrainer
from rollwright.config.experiment import PPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import ClusterConfig, OptimizerConfig, PPOActorConfig, RolloutConfig
from rollwright.config.servers import VLLMConfig
from rollwright.config.tasksets import DatasetConfig
from rollwright.config.teachers import TeacherConfig
from rollwright.errors import EngineError, PromptTooLongError, WeightUpdateError
from rollwright.inference.backends.vllm import VLLMBackend, VLLMClient
from rollwright.inference.request import ModelRequest
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.placement.local_servers import LocalServers
from rollwright.rollout.teachers import Teacher, Teachers

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("ROLLWRIGHT_VLLM_PYTHON", REPOSITORY / ".venv-vllm" / "bin" / "python"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}: build it with scripts/make_vllm_env.sh"),
]


def vllm_config() -> VLLMConfig:
    return VLLMConfig(
        python=str(PYTHON),
        dtype="float32",
        device="cpu",
        max_model_len=512,
        max_num_seqs=64,
        env={"HF_HUB_OFFLINE": "1"},
    )


@contextlib.contextmanager
def vllm_server(model: Path, logs: Path, **settings):
    config = RolloutConfig(backend="vllm", setup_timeout=600, **settings)
    with LocalServers(config, model_path=str(model), logs=logs, vllm=vllm_config()) as servers:
        client = VLLMClient(config, addresses=servers.addresses)
        client.initialize()
        try:
            yield client
        finally:
            client.destroy()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    with vllm_server(model_path, tmp_path_factory.mktemp("logs")) as client:
        yield client, Trainer(model_path)


def test_a_teacher_behind_it_scores_as_transformers(server, model_path):
    import transformers

    client, _ = server
    ids = torch.tensor([[5, 9, 11, 7, 6, 12, 8]])
    trained = torch.tensor([[False, False, True, True, False, True, True]])
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids).bool(), "loss_mask": trained.int()}
    teachers = Teachers([Teacher(TeacherConfig("mentor"), client, None)], top_k=4)
    asyncio.run(teachers.score(rows, None, {}, "a sample"))
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    with torch.no_grad():
        exact_LV = model(ids).logits[0, :-1].double().log_softmax(-1)
    scored, own = rows["teacher_logprobs"][0, 1:].double(), exact_LV.gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(scored[trained[0, 1:]], own[trained[0, 1:]], atol=1e-4, rtol=0)
    top, tokens = exact_LV.topk(4)
    assert torch.equal(rows["teacher_top_ids"][0, 1:][trained[0, 1:]], tokens[trained[0, 1:]])
    torch.testing.assert_close(
        rows["teacher_top_logprobs"][0, 1:][trained[0, 1:]].double(), top[trained[0, 1:]], atol=1e-4, rtol=0
    )


def test_the_server_says_what_the_client_has_to_know(server):
    client, _ = server
    url = f"{client.servers.router.servers[0].url}/server_info?config_format=json"
    config = client.servers.connections.request("GET", url)["vllm_config"]
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert "cpu" in config["device_config"].values()
    assert config["scheduler_config"]["enable_chunked_prefill"] is False
    assert not client.backend.crash_on_seeds


def test_a_run_goes_on_when_its_only_vllm_is_killed(model_path, tmp_path, monkeypatch, request):
    if request.config.getoption("--seeds") < 2:
        pytest.skip("vLLM starts twice, which takes minutes: this is part of the long form (--seeds 2)")
    rows = [{"messages": [{"role": "user", "content": f"task {index}"}], "answer": "x"} for index in range(16)]
    config = PPOConfig(
        experiment_name="killed",
        actor=PPOActorConfig(path=str(model_path), optimizer=OptimizerConfig(lr=1e-3)),
        rollout=RolloutConfig(backend="vllm", max_head_offpolicyness=1, setup_timeout=600),
        vllm=vllm_config(),
        train_dataset=DatasetConfig(batch_size=4),
        gconfig=GenerationHyperparameters(n_samples=2, max_new_tokens=12, temperature=0.7),
        total_train_steps=4,
        cluster=ClusterConfig(fileroot=str(tmp_path / "runs")),
    )
    with PPOTrainer(config, rows) as trainer:
        client = trainer.rollout.client
        port = client.addresses[0].rpartition(":")[2]
        left = [child for child in psutil.Process().children(recursive=True) if port in child.cmdline()]
        load = VLLMBackend.load_from_disk

        def kill_and_load(self, server, directory, version, digest) -> None:
            if version == 2 and left:
                left.pop().kill()  # vLLM; its guard is before it
                left.clear()
            load(self, server, directory, version, digest)

        monkeypatch.setattr(VLLMBackend, "load_from_disk", kill_and_load)
        summary = trainer.train("rollwright.workflows.rlvr.RLVRWorkflow", {"reward_fn": count_tokens})
        assert summary["steps"] == 4
        assert not left
        assert client.get_version() == 4
        assert client.addresses[0].rpartition(":")[2] != port
        assert trainer.rollout.counters()["samples/failed"] == 0


def count_tokens(prompt, completion, prompt_ids, completion_ids, **data) -> float:
    return float(len(set(completion_ids)))


def generate(client, requests):
    async def together():
        return await asyncio.gather(*(client.agenerate(request) for request in requests))

    return asyncio.run(together())


def test_logprobs_are_those_of_transformers_at_temperature_0_7(server):
    client, trainer = server
    responses = generate(client, ask(16, tokens=12, temperature=0.7))
    assert all(len(response.output_tokens) == 12 and response.stop_reason == "length" for response in responses)
    assert trainer.check_versions(responses, tolerance=1e-3) == {trainer.version}
    greedy = generate(
        client, [ModelRequest(input_ids=[10, 11], gconfig=GenerationHyperparameters(greedy=True, max_new_tokens=8))]
    )
    assert trainer.check_versions(greedy) == {trainer.version}


def test_seeds_stops_and_limits(server):
    client, _ = server
    first, second = (generate(client, ask(1, tokens=20))[0].output_tokens for _ in range(2))
    assert first == second
    from rollwright.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(client_model(client)))
    mark = tokenizer.decode(first[5:6])
    request = ask(1, tokens=20)[0]
    request.gconfig = request.gconfig.new(stop=[mark])
    (stopped,) = generate(client, [request])
    assert stopped.output_tokens == first[: len(stopped.output_tokens)]
    assert stopped.stop_reason == "stop"
    assert tokenizer.decode(stopped.output_tokens).endswith(mark)
    assert stopped.stop_match == mark
    request.gconfig = request.gconfig.new(stop=None, stop_token_ids=[first[3]])
    (stopped,) = generate(client, [request])
    assert stopped.output_tokens[-1] == first[3]
    assert stopped.stop_reason == "stop"
    gconfig = GenerationHyperparameters(max_new_tokens=300, ignore_eos=True)
    (cut,) = generate(client, [ModelRequest(input_ids=[5] * 500, gconfig=gconfig)])  # 512 is the context
    assert (len(cut.output_tokens), cut.stop_reason) == (12, "length")
    with pytest.raises(PromptTooLongError):
        generate(client, [ModelRequest(input_ids=[5] * 600)])
    with pytest.raises(EngineError, match="top_p"):
        generate(client, [ModelRequest(input_ids=[5], gconfig=GenerationHyperparameters(top_p=0.5))])


def client_model(client) -> str:
    return client.servers.connections.request("GET", f"{client.servers.router.servers[0].url}/v1/models")["data"][0]["id"]


@pytest.mark.parametrize("way", ["disk", "shared"])
def test_a_published_weight_changes_what_is_sampled_and_agrees_with_the_trainer(server, tmp_path, way):
    client, trainer = server
    meta = WeightUpdateMeta.from_disk(tmp_path) if way == "disk" else WeightUpdateMeta.shared()
    for _ in range(3):
        before = generate(client, ask(4, tokens=12))
        version = trainer.step()
        assert trainer.publish(client, meta).agreements[0].mean < 1e-4
        after = generate(client, ask(4, tokens=12))
        assert [r.output_tokens for r in before] != [r.output_tokens for r in after]
        assert trainer.check_versions(after) == {version}


def generated_tokens(client) -> float:
    """How many tokens the server has made so far: a counter, so that nothing is missed between two looks."""
    text = client.servers.connections.request("GET", f"{client.servers.router.servers[0].url}/metrics")["text"]
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:generation_tokens_total"))


async def generating(client, since: float, *requests: asyncio.Task) -> None:
    """Return when the server has made tokens since a look at its counter; what a request raises before that is raised."""
    deadline = time.monotonic() + 300
    while await asyncio.to_thread(generated_tokens, client) <= since:
        for request in requests:
            if request.done():
                request.result()
        assert time.monotonic() < deadline, "the server has made no token"
        await asyncio.sleep(0.01)


def changed_under_way(response) -> bool:
    return len(set(response.output_versions)) > 1


def test_versions_are_right_when_weights_change_under_running_requests(server, tmp_path):
    client, trainer = server
    before = trainer.version

    def update():
        trainer.step()
        trainer.publish(client, WeightUpdateMeta.from_disk(tmp_path))

    async def scenario():
        answered, is_over = [[] for _ in range(8)], False

        async def keep_asking(requests, answers):
            while not is_over:
                answers.append(await client.agenerate(next(requests)))

        # Few at a time: with its 64 slots full, the server's engine runs seconds ahead of its HTTP front, and a pause can find
        # every request sampled to its end though none has been answered. Where that happens with few, it is done again.
        requests = itertools.chain.from_iterable(ask(64, tokens=300, seed=64 * wave) for wave in itertools.count())
        running = [asyncio.ensure_future(keep_asking(requests, answers)) for answers in answered]
        for _ in range(20):
            made = await asyncio.to_thread(generated_tokens, client)
            await generating(client, made, *running)
            await asyncio.to_thread(update)
            counts = list(map(len, answered))
            while any(len(answers) == count for answers, count in zip(answered, counts, strict=True)):
                for task in running:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)
            if any(map(changed_under_way, itertools.chain(*answered))):
                break
        is_over = True
        await asyncio.gather(*running)
        return list(itertools.chain(*answered))

    responses = asyncio.run(scenario())
    assert all(len(response.output_tokens) == 300 for response in responses)
    assert any(map(changed_under_way, responses))
    seen = trainer.check_versions(responses, tolerance=2e-3)
    assert before in seen
    assert len(seen) > 1


def test_abort_and_a_cancelled_request(server):
    client, _ = server

    async def start() -> tuple[ModelRequest, asyncio.Task]:
        made = await asyncio.to_thread(generated_tokens, client)
        (request,) = ask(1, tokens=500)
        task = asyncio.ensure_future(client.agenerate(request))
        await generating(client, made, task)
        return request, task

    async def scenario():
        for _ in range(10):  # on a busy machine a request may have ended before it can be aborted
            request, task = await start()
            await asyncio.to_thread(client.abort, request.rid)
            aborted = await task
            if aborted.stop_reason == "abort":
                break
        _, cancelled = await start()
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        return aborted

    aborted = asyncio.run(scenario())
    assert aborted.stop_reason == "abort"
    assert len(aborted.output_tokens) < 500
    assert all(router_server.load == 0 for router_server in client.servers.router.servers)


def test_a_tied_head_that_keeps_its_old_copy_is_caught_and_told(tmp_path):
    """vLLM's CPU build answers 200 and says the new version, and computes with the old output head."""
    path = write_model(tmp_path / "model", tied=True)
    with vllm_server(path, tmp_path / "logs") as client:
        trainer = Trainer(path)
        trainer.publish(client)  # unchanged weights agree
        version = trainer.step()
        with pytest.raises(WeightUpdateError, match="tied embeddings"):
            trainer.publish(client)
        assert client.backend.read_version(client.servers.router.servers[0]) == str(
            version
        )  # the label alone would have passed


def test_training_for_several_steps_against_the_server(server, model_path, tmp_path):
    """The whole loop: sample from vLLM, train, publish by disk, and agree after every update."""
    from rollwright import RemoteVLLMEngine
    from rollwright.config.experiment import FinetuneSpec
    from rollwright.config.sections import NormConfig, OptimizerConfig, PPOActorConfig
    from rollwright.training.actor import FSDPPPOActor
    from rollwright.workflows.rlvr import RLVRWorkflow

    client, _ = server
    actor = FSDPPPOActor(
        PPOActorConfig(
            path=str(model_path), optimizer=OptimizerConfig(lr=1e-3), adv_norm=NormConfig(mean_level="batch", std_level="batch")
        )
    )
    actor.initialize(None, FinetuneSpec(1, 64, 4, 4))
    actor.version = client.get_version()
    config = RolloutConfig(backend="vllm", addresses=client.addresses, setup_timeout=300)
    rollout = RemoteVLLMEngine(config)
    rollout.initialize()
    try:
        from rollwright.data.tokenizer import load_tokenizer

        workflow = RLVRWorkflow(
            reward_fn=lambda prompt, completion, prompt_ids, completion_ids, **data: float(len(set(completion_ids))),
            gconfig=GenerationHyperparameters(n_samples=1, max_new_tokens=16, temperature=0.7),
            tokenizer=load_tokenizer(str(model_path)),
        )
        actor.connect_engine(rollout, WeightUpdateMeta.from_disk(tmp_path / "weights"))
        actor.republish()
        start = actor.version
        for step in range(3):
            tasks = [{"messages": [{"role": "user", "content": f"task {step} {index}"}], "answer": "x"} for index in range(4)]
            batch = rollout.rollout_batch(tasks, workflow=workflow, group_size=2)
            mask = batch["loss_mask"].bool()
            assert set(batch["versions"][mask].tolist()) == {start + step}
            trained = actor.compute_logp(batch)
            assert (trained - batch["logprobs"])[mask].abs().mean() < 1e-3
            actor.compute_advantages(batch)
            actor.ppo_update(batch)
            actor.step_lr_scheduler()
            rollout.pause()
            actor.update_weights()
            rollout.resume()
            actor.set_version(start + step + 1)
            rollout.set_version(start + step + 1)
            assert actor._publisher.agreements[0].mean < 1e-3
        assert not torch.equal(
            actor.model.get_input_embeddings().weight, Trainer(model_path).model.get_input_embeddings().weight
        )
    finally:
        rollout.destroy()
        actor.destroy()


def test_the_trainer_samples_ahead_on_the_server(server, model_path, tmp_path):
    """The trainer as it is run: samples of the next batches run while weights change on disk, and every step is audited."""
    from rollwright import PPOTrainer
    from rollwright.config.experiment import PPOConfig
    from rollwright.config.sections import ClusterConfig, NormConfig, OptimizerConfig, PPOActorConfig
    from rollwright.config.tasksets import DatasetConfig
    from rollwright.tracking.metrics_file import read_metrics

    client, _ = server
    config = PPOConfig(
        experiment_name="ahead",
        actor=PPOActorConfig(
            path=str(model_path),
            optimizer=OptimizerConfig(lr=1e-3),
            adv_norm=NormConfig(mean_level="batch", std_level="batch"),
            use_decoupled_loss=True,
        ),
        rollout=RolloutConfig(
            backend="vllm",
            addresses=client.addresses,
            weight_update="disk",
            weight_update_path=str(tmp_path / "weights"),
            max_head_offpolicyness=2,
            setup_timeout=300,
        ),
        train_dataset=DatasetConfig(batch_size=4),
        gconfig=GenerationHyperparameters(n_samples=2, max_new_tokens=60, temperature=0.7, ignore_eos=True),
        total_train_steps=6,
        cluster=ClusterConfig(fileroot=str(tmp_path / "runs"), threads=1),
    )
    rows = [{"messages": [{"role": "user", "content": f"task {index}"}], "answer": "x"} for index in range(16)]
    reward = {"reward_fn": lambda prompt, completion, prompt_ids, completion_ids, **data: float(len(set(completion_ids)))}
    with PPOTrainer(config, rows) as trainer:
        assert trainer.train("rollwright.workflows.rlvr.RLVRWorkflow", reward)["steps"] == 6
        assert trainer.rollout.get_version() == 6
        steps = read_metrics(trainer.directory.metrics_file)
    assert [step["actor/logprob_difference/probe"] < 1e-3 for step in steps] == [True] * 6
    assert max(step["actor/staleness/max"] for step in steps) in (1, 2)
    assert all(step["actor/mismatch/kl"] < 1e-4 for step in steps if step.get("actor/mismatch/kl") is not None)
