"""A tiny model on disk, ``rollwright serve-model`` processes over it, and a trainer to compare them with."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import peft
import torch
from parts import qwen3_config, random_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.inference import remote
from rollwright.inference.backends.sglang import SGLangClient
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.weights.adapter import AdapterRoom, AdapterSpec
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.placement.local_servers import LocalServers
from rollwright.training.publish_and_audit import SentWeights

remote.CHECK_SECONDS = 60.0  # a server that a busy machine keeps waiting is not one that is gone


def write_model(directory: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A random Qwen3 of 0.1 M parameters whose distributions are far from uniform, and a character tokenizer."""
    tokenizer = build_character_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 512}
    model = random_model(qwen3_config(tokenizer, **sizes, tie_word_embeddings=tied), seed=seed, scale=3.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


class Trainer:
    """An actor as publication sees it: weights that change, and their log-probabilities by Transformers in float64."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.version = 0
        self.history = {0: self._copy()}

    device = torch.device("cpu")
    compute_dtype = torch.float32

    def weights(self, dtype: torch.dtype | None = None) -> WeightStream:
        return WeightStream.of(self.model.state_dict())

    def publish(self, client: SGLangClient, meta: WeightUpdateMeta | None = None) -> SentWeights:
        """Publish the present weights and audit the servers, as an actor does; returns what holds the agreements."""
        publisher = SentWeights(client, meta)
        publisher.publish(self, self.version)
        return publisher

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def step(self) -> int:
        """Change every weight; returns the version that the new ones will have."""
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
        self.version += 1
        self.history[self.version] = self._copy()
        return self.version

    @torch.no_grad()
    def compute_logp(self, batch: dict[str, Tensor]) -> Tensor:
        ids, temperature = batch["input_ids"], batch["temperature"]
        logprobs = torch.log_softmax(self.model(ids).logits.double() / temperature[:, None, None], -1)
        result = torch.zeros(ids.shape, dtype=torch.float64)
        result[:, 1:] = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        return result

    def expected(self, response: ModelResponse, version: int) -> Tensor:
        """Log-probabilities of the output tokens under the weights of ``version``, given everything before each."""
        self.model.load_state_dict(self.history[version])
        ids = torch.tensor([response.input_tokens + response.output_tokens])
        batch = {"input_ids": ids, "temperature": torch.tensor([response.temperature])}
        return self.compute_logp(batch)[0, len(response.input_tokens) :]

    def check_versions(self, responses: list[ModelResponse], tolerance: float = 1e-3) -> set[int]:
        """Every token's log-probability is that of the version it is labelled with; returns the versions seen.

        The versions' weights differ, so a wrong label shows as a wrong log-probability.
        """
        seen: set[int] = set()
        for response in responses:
            versions = torch.tensor(response.output_versions)
            given = torch.tensor(response.output_logprobs, dtype=torch.float64)
            for version in sorted(set(response.output_versions)):
                mask = versions == version
                difference = (given - self.expected(response, version)).abs()[mask].max()
                assert difference < tolerance, f"tokens labelled {version} are not of version {version}: {difference:.2e}"
                seen.add(version)
            assert response.output_versions == sorted(response.output_versions)
        self.model.load_state_dict(self.history[self.version])
        return seen


class AdapterTrainer(Trainer):
    """A trainer of a LoRA adapter of all linear layers, computed by PEFT."""

    def __init__(self, path: Path, *, rank: int = 4, seed: int = 0) -> None:
        super().__init__(path)
        targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        self.spec = AdapterSpec(rank, 2.0 * rank, targets, base=str(path))
        torch.manual_seed(seed)
        described = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), init_lora_weights=True)
        self.model, self.seed = peft.get_peft_model(self.model, described), seed
        self.history = {0: self._copy()}

    def weights(self, dtype: torch.dtype | None = None) -> WeightStream:
        return WeightStream.of(dict(peft.get_peft_model_state_dict(self.model)), self.spec)

    def step(self) -> int:
        """Change A and B; returns the version that the new adapter will have."""
        generator = torch.Generator().manual_seed(1000 * self.seed + self.version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        self.version += 1
        self.history[self.version] = self._copy()
        return self.version


@contextlib.contextmanager
def served_model(
    path: Path, logs: Path, count: int = 1, adapters: AdapterRoom | None = None, **settings
) -> Iterator[tuple[LocalServers, SGLangClient]]:
    """``count`` processes of ``rollwright serve-model`` and a client of theirs."""
    config = RolloutConfig(backend="builtin_process", max_running_requests=64, setup_timeout=300, **settings)
    with LocalServers(config, model_path=str(path), logs=logs, count=count, threads=1, adapters=adapters) as servers:
        client = SGLangClient(config, addresses=servers.addresses)
        client.initialize()
        try:
            yield servers, client
        finally:
            client.destroy()


def ask(count: int, *, tokens: int, seed: int = 0, temperature: float = 0.7) -> list[ModelRequest]:
    """Requests of forced length with prompts and seeds of their own."""
    gconfig = GenerationHyperparameters(max_new_tokens=tokens, temperature=temperature, ignore_eos=True)
    return [
        ModelRequest(input_ids=[6 + i % 90, 7, 8 + i % 7], gconfig=gconfig, rid=f"talk {seed}-{i}", seed=seed + i)
        for i in range(count)
    ]


async def gather_while(
    client, requests: list[ModelRequest], act: Callable[[], object], *, seen: Callable[[ModelResponse], bool] | None = None
) -> list[ModelResponse]:
    """Send ``requests`` at once, and run ``act`` in a thread when every server in service is generating.

    As many requests run until ``act`` has returned, however fast the servers are: one that is answered before is followed by
    another like it. Where no response is one that has to be ``seen``, ``act`` fell between two requests, and is run again
    under others, at most twenty times.
    """
    servers, is_over = client.servers.router.in_service(), False
    answered: list[list[ModelResponse]] = [[] for _ in requests]

    def generated() -> list[int]:
        infos = (client.servers.connections.request("GET", f"{server.url}/server_info") for server in servers)
        return [info["stats"]["generated_tokens"] for info in infos]

    async def keep_asking(request: ModelRequest, answers: list[ModelResponse]) -> None:
        answers.append(await client.agenerate(request))
        while not is_over:
            again = dataclasses.replace(
                request, rid=f"{request.rid}+{len(answers)}", seed=request.seed + 100_000 * len(answers)
            )
            answers.append(await client.agenerate(again))

    async def a_moment() -> None:
        for task in running:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)

    async with asyncio.timeout(500):
        before = await asyncio.to_thread(generated)
        running = [asyncio.ensure_future(keep_asking(*each)) for each in zip(requests, answered, strict=True)]
        while any(now == old for now, old in zip(await asyncio.to_thread(generated), before, strict=True)):
            await a_moment()
        for _ in range(20):
            await asyncio.to_thread(act)
            if seen is None:
                break
            ran_under_it = list(map(len, answered))
            while any(len(answers) == count for answers, count in zip(answered, ran_under_it, strict=True)):
                await a_moment()
            if any(map(seen, itertools.chain(*answered))):
                break
        is_over = True
        await asyncio.gather(*running)
        return list(itertools.chain(*answered))
