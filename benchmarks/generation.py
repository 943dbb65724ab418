"""Generation throughput of the built-in engine against transformers, a bare decode step and, where given, a vLLM server.

    python benchmarks/generation.py [--sizes 1M,5M,26M] [--json FILE] [--vllm-python PATH]

256 requests of 32 prompt tokens and forced output lengths (log-normal, median 48, sigma 0.8, 8 to 256) at temperature 1.
Figures are useful tokens per second: tokens that a request asked for. All run with the same threads and at most 256
sequences at once. ``transformers.generate`` runs at its best batch size, each batch until its longest request ends.
``decode step`` is the model's own forward with its cache and a log-softmax, without sampling or scheduling, at the mean
number of sequences that the engine had in a step. Rounds are interleaved, and each figure is the best of its rounds.
``batch-invariant`` is the engine of a deterministic run, whose answers do not depend on what is computed beside them, with all the
threads; its ratio is the share of the other engine's throughput that it keeps.
``--vllm-python`` names the interpreter of an environment with vLLM's CPU build (scripts/make_vllm_env.sh makes one).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from grpo_step import word_tokenizer
from report import Report

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest

#: ``--clock processor`` counts this process's processor seconds instead: with one thread they say what a busy machine's wall
#: clock cannot.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
clock = CLOCKS["wall"]

REQUESTS, PROMPT_LENGTH, MOST_AT_ONCE = 256, 32, 256

SIZES = {
    "1M": {"hidden_size": 128, "layers": 4, "heads": 4, "kv_heads": 2, "vocabulary": 2048},
    "5M": {"hidden_size": 256, "layers": 5, "heads": 4, "kv_heads": 2, "vocabulary": 4096},
    "26M": {"hidden_size": 512, "layers": 7, "heads": 8, "kv_heads": 4, "vocabulary": 8192},
}


def qwen3(hidden_size: int, layers: int, heads: int, kv_heads: int, vocabulary: int):
    """A random model of Qwen3 shape, float32, the head tied as in Qwen's small models."""
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden_size // heads,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def workload(vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths, the same in every run."""
    generator = np.random.default_rng(7)
    prompts = generator.integers(10, vocabulary, (REQUESTS, PROMPT_LENGTH)).tolist()
    lengths = np.clip(np.exp(generator.normal(np.log(48), 0.8, REQUESTS)), 8, 256).astype(int).tolist()
    return prompts, lengths


def engine_seconds(engine: BuiltinEngine, prompts: list[list[int]], lengths: list[int]) -> float:
    """Seconds for all requests; every response has its length, tokens, log-probabilities and versions."""
    requests = [
        ModelRequest(prompt, GenerationHyperparameters(max_new_tokens=length, ignore_eos=True), seed=index)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    engine.flush_cache()
    start = clock()
    responses = engine.generate(requests)
    seconds = clock() - start
    assert [len(r.output_logprobs) for r in responses] == lengths
    return seconds


def transformers_generate_seconds(model, prompts: list[list[int]], lengths: list[int], batch: int) -> float:
    """Seconds for all requests in batches, each as long as its longest."""
    start = clock()
    for first in range(0, len(prompts), batch):
        ids = torch.tensor(prompts[first : first + batch])
        longest = max(lengths[first : first + batch])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=longest,
            max_new_tokens=longest,
        )
        assert output.shape[1] == ids.shape[1] + longest
    return clock() - start


def transformers_continuous_seconds(model, prompts: list[list[int]], lengths: list[int]) -> float:
    """Seconds for all requests by transformers' continuous batching, without its start."""
    generation = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, max_new_tokens=256
    )
    settings = transformers.ContinuousBatchingConfig(
        page_size=32, num_blocks=4096, max_batch_tokens=1024, max_requests_per_batch=MOST_AT_ONCE, allow_block_sharing=False
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=settings, timeout=5
    ) as serving:
        start = clock()
        for prompt, length in zip(prompts, lengths, strict=True):
            serving.add_request(prompt, max_new_tokens=length)
        produced = []
        while len(produced) < REQUESTS:
            result = serving.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(f"continuous batching failed: {result.error}")
                produced.append(len(result.generated_tokens))
            elif result is None and not serving.is_running():
                raise RuntimeError("transformers' continuous batching ended early")
        seconds = clock() - start
    assert sorted(produced) == sorted(lengths)
    return seconds


@torch.inference_mode()
def decode_step_rate(model, batch: int, steps: int = 48) -> float:
    """Tokens a second of forward with its cache and log-softmax, from 48 cached tokens on."""
    vocabulary = model.config.vocab_size
    cache = transformers.DynamicCache()
    model(torch.randint(10, vocabulary, (batch, PROMPT_LENGTH + 16)), past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = torch.randint(10, vocabulary, (batch, 1))
    start = clock()
    for _ in range(steps):
        logits = model(token, past_key_values=cache, use_cache=True).logits
        logits[:, -1].log_softmax(-1)
    return batch * steps / (clock() - start)


class VLLMServer:
    """A vLLM server in its own environment, for as long as the context lasts."""

    def __init__(self, python: str, model, threads: int) -> None:
        self._python, self._model, self._threads = python, model, threads

    def __enter__(self) -> VLLMServer:
        self._directory = tempfile.TemporaryDirectory()
        path = Path(self._directory.name)
        self._model.save_pretrained(path / "model")
        word_tokenizer(self._model.config.vocab_size).save_pretrained(path / "model")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "OMP_NUM_THREADS": str(self._threads),
        }
        command = [
            self._python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(path / "model"),
            "--port",
            str(self.port),
            "--dtype",
            str(self._model.dtype).removeprefix("torch."),
            "--max-model-len",
            "512",
            "--max-num-seqs",
            str(MOST_AT_ONCE),
            "--enforce-eager",
            "--no-enable-prefix-caching",
            "--served-model-name",
            "bench",
        ]
        self._log = (path / "log").open("w+")
        self._process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=subprocess.STDOUT)
        self._wait(240)
        return self

    def _wait(self, seconds: float) -> None:
        import httpx2

        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"http://127.0.0.1:{self.port}/health", timeout=2).status_code == 200:
                    return
            time.sleep(0.5)
        self._log.seek(0)
        tail = self._log.read()[-3000:]
        self.__exit__()
        raise RuntimeError(f"the vLLM server did not start:\n{tail}")

    def __exit__(self, *exc_info: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._directory.cleanup()

    def seconds(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Seconds for all requests, sent at once."""
        return asyncio.run(self._send(prompts, lengths))

    async def _send(self, prompts: list[list[int]], lengths: list[int]) -> float:
        import httpx2

        limits = httpx2.Limits(max_connections=MOST_AT_ONCE, max_keepalive_connections=MOST_AT_ONCE)
        async with httpx2.AsyncClient(timeout=600, limits=limits) as client:

            async def complete(prompt: list[int], length: int) -> int:
                body = {
                    "model": "bench",
                    "prompt": prompt,
                    "max_tokens": length,
                    "min_tokens": length,
                    "ignore_eos": True,
                    "temperature": 1.0,
                    "logprobs": 0,
                    "return_token_ids": True,
                }
                response = await client.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body)
                response.raise_for_status()
                return len(response.json()["choices"][0]["token_ids"])

            start = clock()
            produced = await asyncio.gather(*(complete(p, n) for p, n in zip(prompts, lengths, strict=True)))
            seconds = clock() - start
        assert produced == lengths
        return seconds


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Peers' warnings do not belong in the table."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def measure(name: str, arguments: argparse.Namespace, report: Report) -> None:
    """Measure all columns at one model size, in interleaved rounds."""
    model = qwen3(**SIZES[name])
    prompts, lengths = workload(SIZES[name]["vocabulary"])
    useful = sum(lengths)
    rates: dict[str, list[float]] = {}

    def timed(column: str, seconds: Callable[[], float]) -> None:
        rates.setdefault(column, []).append(useful / seconds())
        gc.collect()

    settings: dict[str, Any] = {"max_running_requests": MOST_AT_ONCE, "kv_cache_bytes": 1 << 30}
    engine = BuiltinEngine(model, **settings)
    is_asked = "batch-invariant" in arguments.peers.split(",")
    invariant = BuiltinEngine(model, batch_invariant=True, **settings) if is_asked else None
    server = (
        VLLMServer(arguments.vllm_python, model, torch.get_num_threads()) if arguments.vllm_python else contextlib.nullcontext()
    )
    with engine, invariant or contextlib.nullcontext(), server, quiet():
        for each in filter(None, (engine, invariant)):
            engine_seconds(each, prompts[:32], lengths[:32])
        before = engine.stats()
        for round_index in range(arguments.rounds):
            timed("rollwright", lambda: engine_seconds(engine, prompts, lengths))
            if invariant is not None:
                timed("batch-invariant", lambda: engine_seconds(invariant, prompts, lengths))
            if round_index == 0:
                after = engine.stats()
                mean_batch = round(
                    (after["generated_tokens"] - before["generated_tokens"]) / (after["steps"] - before["steps"])
                )
            for batch in sorted({mean_batch, 64, 256}):
                rates.setdefault(f"decode step at {batch}", []).append(decode_step_rate(model, batch))
            if "generate" in arguments.peers:
                for batch in (64, 128, 256):
                    timed(f"generate, batch {batch}", lambda: transformers_generate_seconds(model, prompts, lengths, batch))  # noqa: B023
            if "continuous" in arguments.peers:
                timed("transformers continuous", lambda: transformers_continuous_seconds(model, prompts, lengths))
            if arguments.vllm_python:
                timed("vllm", lambda: server.seconds(prompts, lengths))

    best = {column: max(values) for column, values in rates.items()}
    parameters = sum(p.numel() for p in model.parameters())
    for column, rate in best.items():
        report.row(
            model=f"{name} ({parameters / 1e6:.1f} M)",
            engine=column,
            useful_tokens_per_second=rate,
            rollwright_is=best["rollwright"] / rate,
            rounds=" ".join(f"{r:,.0f}" for r in rates[column]),
        )
    if invariant is not None:
        report.ratio(f"batch_invariant/{name}", best["batch-invariant"] / best["rollwright"])
    peers = {
        "transformers_generate": max((r for c, r in best.items() if c.startswith("generate")), default=None),
        "transformers_continuous": best.get("transformers continuous"),
        "decode_step": best[f"decode step at {mean_batch}"],
        "vllm": best.get("vllm"),
    }
    for peer, rate in peers.items():
        if rate is not None:
            report.ratio(f"{peer}/{name}", best["rollwright"] / rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1M,5M,26M", help="comma-separated, of: " + ", ".join(SIZES))
    parser.add_argument(
        "--peers",
        default="generate,continuous",
        help="comma-separated, of: generate, continuous, batch-invariant (the engine of a deterministic run, which may compute requests "
        "one at a time with several threads); or none",
    )
    parser.add_argument("--rounds", type=int, default=2, help="interleaved repeats; the best of each column counts")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of every side (default: all cores)")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="processor: this process's processor seconds, for --threads 1 on a busy machine",
    )
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM; adds a column")
    parser.add_argument("--json", type=Path, help="write machine, results and ratios to this file")
    arguments = parser.parse_args()
    if arguments.clock == "processor" and (arguments.threads != 1 or arguments.vllm_python):
        parser.error("--clock processor compares work on one thread of this process: use --threads 1 and no vLLM")
    global clock
    clock = CLOCKS[arguments.clock]
    torch.set_num_threads(arguments.threads)
    report = Report("Generation: useful tokens per second")
    for size in arguments.sizes.split(","):
        measure(size, arguments, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
