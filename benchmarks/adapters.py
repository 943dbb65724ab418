"""What a LoRA adapter costs beside its base: the engine's speed, the size of a publication, and memory in training.

    python benchmarks/adapters.py [--parts engine,training] [--sizes 5M,26M] [--shape 135M] [--json FILE]

``engine``: 64 requests of 32 prompt tokens and 64 new ones, all at once, in engines over the same model: with its own weights alone, with one
adapter of rank 16 on all linear layers, and with two versions of it, each for half of the requests. The engines take turns, and the fastest
round of each counts; a ratio is an engine's speed against that without adapters.

``training``: steps of GRPO on a model of SmolLM-135M's shape in float32, 4 prompts of 256 tokens with 4 samples of 64 tokens each: sampled,
trained in micro-batches of 512 tokens, and published; once with all weights and once with an adapter of rank 8, each in a process of its own
with the same settings. The ratios: ``bytes`` is the number of elements of a publication of the adapter against that of the base, ``file``
the bytes of that publication against the adapter's file, ``memory`` gradients and optimizer state against those of full training, and
``peak`` the largest anonymous memory above that after the imports, from loading on, against that of full training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from generation import SIZES, qwen3
from rank_memory import QUICK, RETURNED_AT_ONCE, Peaks, write_model
from report import Report

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.request import ModelRequest
from rollwright.inference.weights.adapter import PREFIX, WEIGHTS_FILE, AdapterSpec, version_name
from rollwright.inference.weights.stream import WeightStream

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
ROWS, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 64
RANK_OF_ENGINE = 16

#: Hidden size, layers, vocabulary, and the rest. The first is SmolLM-135M's.
SHAPES: dict[str, tuple[tuple[int, int, int], dict[str, int]]] = {
    "135M": ((576, 30, 49152), {"num_key_value_heads": 3, "intermediate_size": 1536}),
    "15M": (QUICK, {}),
}
RANK_OF_TRAINING, GROUPS, SAMPLES, LONG_PROMPT, MICRO_BATCH, STEPS = 8, 4, 4, 256, 512, 2


# -- the engine --------------------------------------------------------------------------------------------------------


def random_adapter(model: Any, rank: int, seed: int) -> WeightStream:
    """Make an adapter of all linear layers but the head, neither half of which is 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors, targets = {}, set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            outputs, inputs = module.weight.shape
            tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / (10 * rank)
            targets.add(name.rpartition(".")[2])
    return WeightStream.of(tensors, AdapterSpec(rank, 2.0 * rank, tuple(sorted(targets))))


def requests(vocabulary: int, versions: int) -> list[ModelRequest]:
    """The requests of a round, which use the adapters of the versions in turn."""
    prompts = torch.randint(10, vocabulary, (ROWS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    gconfig = GenerationHyperparameters(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    names = [version_name(1 + number) for number in range(versions)] or [None]
    return [
        ModelRequest(prompt, gconfig, seed=index, lora_name=name)
        for index, (prompt, name) in enumerate(zip(prompts, itertools.cycle(names), strict=False))
    ]


def measure_engines(size: str, arguments: argparse.Namespace, report: Report) -> None:
    """Compare an engine without adapters with those that have one and two, at one size of the model."""
    from rollwright.inference.backends.builtin.engine import BuiltinEngine

    clock, model = CLOCKS[arguments.clock], qwen3(**SIZES[size])
    kinds = {"full weights": 0, "one adapter": 1, "two versions": 2}
    engines, rates = {}, {kind: list[float]() for kind in kinds}
    for kind, versions in kinds.items():
        engines[kind] = BuiltinEngine(
            model, max_running_requests=ROWS, context_length=512, kv_cache_bytes=1 << 30, threads=arguments.threads
        )
        for version in range(1, 1 + versions):
            engines[kind].receive_weights(random_adapter(model, RANK_OF_ENGINE, version), version, None, None)
    for number in range(1 + arguments.rounds):
        for kind, versions in kinds.items():
            sent = requests(SIZES[size]["vocabulary"], versions)
            engines[kind].flush_cache()
            start = clock()
            answers = engines[kind].generate(sent)
            seconds = clock() - start
            assert all(len(answer.output_tokens) == NEW_TOKENS for answer in answers)
            found = {version for answer in answers for version in answer.output_versions}
            assert found == (set(range(1, 1 + versions)) or {0}), found
            if number:  # the first round only makes room
                rates[kind].append(ROWS * NEW_TOKENS / seconds)
    for engine in engines.values():
        engine.destroy()
    best = {kind: max(each) for kind, each in rates.items()}
    for kind, rate in best.items():
        share = rate / best["full weights"]
        report.row(part=f"engine {size}", side=kind, tokens_per_second=rate, relative=share, rounds=_written(rates[kind]))
    report.ratio(f"engine/{size}", best["one adapter"] / best["full weights"])
    report.ratio(f"engine_mixed/{size}", best["two versions"] / best["full weights"])


def _written(rates: list[float]) -> str:
    return " ".join(f"{rate:,.0f}" for rate in rates)


# -- training ----------------------------------------------------------------------------------------------------------


class FixedLength:
    """A workflow: one completion of a forced length, rewarded by its tokens."""

    gconfig = GenerationHyperparameters(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, ignore_eos=True)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        """Sample and score one completion."""
        response = await engine.agenerate(ModelRequest(input_ids=data["ids"], gconfig=self.gconfig))
        return {
            "input_ids": response.input_tokens,
            "output_ids": response.output_tokens,
            "reward": sum(response.output_tokens) % 7 / 7,
        }


def side_main(kind: str, path: str, threads: int) -> dict[str, float]:
    """Train two steps with all weights (``full``) or with an adapter; returns what that took."""
    from rollwright.config.experiment import FinetuneSpec
    from rollwright.config.sections import LoraConfig, MicroBatchSpec, OptimizerConfig, PPOActorConfig, RolloutConfig
    from rollwright.rollout.engines import LocalRolloutEngine
    from rollwright.training.actor import FSDPPPOActor

    torch.set_num_threads(threads)
    import peft  # noqa: F401 - also on the side that does not use it
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    torch.ones(64, 64) @ torch.ones(64, 64)
    lora = LoraConfig(rank=RANK_OF_TRAINING, alpha=2.0 * RANK_OF_TRAINING) if kind == "lora" else None
    config = PPOActorConfig(path=path, device="cpu", dtype="float32", optimizer=OptimizerConfig(lr=1e-5), lora=lora)
    config.mb_spec = MicroBatchSpec(max_tokens_per_mb=MICRO_BATCH)
    actor = FSDPPPOActor(config)
    vocabulary, draw = vocabulary_of(path), torch.Generator().manual_seed(0)
    tasks = [{"ids": torch.randint(1, vocabulary, (LONG_PROMPT,), generator=draw).tolist()} for _ in range(GROUPS)]
    found: dict[str, float] = {}
    peaks = Peaks()
    with peaks.phase("all"):
        actor.initialize(None, FinetuneSpec(1, 100, 10))
        note_gradients(actor, found)
        rollout = LocalRolloutEngine(
            RolloutConfig(max_running_requests=GROUPS * SAMPLES, device="cpu"), model=actor.shared_model
        )
        rollout.initialize()
        actor.connect_engine(rollout)
        for _ in range(STEPS):
            batch = actor.compute_advantages(rollout.rollout_batch(tasks, FixedLength(), group_size=SAMPLES))
            stats = actor.ppo_update(batch)
            assert stats["logprob_difference/max"] < 1e-3
            actor.step_lr_scheduler()
            actor.update_weights()
    found["peak"], found["seconds"] = peaks.found["all"]
    state = [value for each in actor.optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    found["state"] = sum(tensor.nbytes for tensor in state) / 2**20
    stream = actor.weights()
    found["elements"] = sum(tensor.numel() for _, tensor in stream)
    found["bytes"] = stream.nbytes
    with tempfile.TemporaryDirectory() as directory:
        actor.save(Path(directory) / "saved")
        file = Path(directory) / "saved" / WEIGHTS_FILE
        found["file"] = file.stat().st_size if file.exists() else 0
    rollout.destroy()
    return found


def vocabulary_of(path: str) -> int:
    """Number of tokens of the model in a directory."""
    return int(json.loads((Path(path) / "config.json").read_text())["vocab_size"])


def note_gradients(actor: Any, found: dict[str, float]) -> None:
    """Let the optimizer note the MiB of gradients that it steps with, in place."""
    step = actor.optimizer.step

    def noting(*arguments: Any, **options: Any) -> Any:
        gradients = [parameter.grad for parameter in actor.model.parameters() if parameter.grad is not None]
        found["gradients"] = sum(gradient.nbytes for gradient in gradients) / 2**20
        return step(*arguments, **options)

    actor.optimizer.step = noting


def measure_training(arguments: argparse.Namespace, report: Report) -> None:
    """Train both sides in processes of their own, and compare."""
    sides = {}
    with tempfile.TemporaryDirectory() as directory:
        sizes, more = SHAPES[arguments.shape]
        base = write_model(Path(directory) / "model", *sizes, **more)
        for kind in ("full", "lora"):
            command = [sys.executable, __file__, "--as-side", kind, f"{directory}/model", "--threads", str(arguments.threads)]
            environment = {**os.environ, **RETURNED_AT_ONCE, "OMP_NUM_THREADS": str(arguments.threads)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"the side {kind} failed:\n{done.stderr[-3000:]}")
            sides[kind] = json.loads(done.stdout.strip().splitlines()[-1])
    for kind, found in sides.items():
        columns = {name: round(found[name], 1) for name in ("gradients", "state", "peak")}
        report.row(
            part=f"training {arguments.shape}, MiB",
            side=kind,
            **columns,
            published_elements=int(found["elements"]),
            seconds=found["seconds"],
        )
    full, lora = sides["full"], sides["lora"]
    report.machine["parameters"] = base
    report.ratio(f"bytes/{arguments.shape}", lora["elements"] / base)
    report.ratio(f"file/{arguments.shape}", lora["bytes"] / lora["file"])
    report.ratio(f"memory/{arguments.shape}", (lora["gradients"] + lora["state"]) / (full["gradients"] + full["state"]))
    report.ratio(f"peak/{arguments.shape}", lora["peak"] / full["peak"])


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="engine,training", help="which parts, separated by commas")
    parser.add_argument("--sizes", default="5M,26M", help="models of the part engine, of: " + ", ".join(SIZES))
    parser.add_argument("--shape", choices=SHAPES, default="135M", help="model of the part training; 15M for a quick look")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which the engines take turns")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="compute threads of every side (all cores)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: of all threads together, on a busy machine")
    parser.add_argument("--json", type=Path, help="write machine, results and ratios to this file")
    parser.add_argument("--as-side", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_side:
        print(json.dumps(side_main(*arguments.as_side, arguments.threads)))
        return
    torch.set_num_threads(arguments.threads)
    report = Report("Adapters beside their base")
    for size in arguments.sizes.split(",") if "engine" in arguments.parts.split(",") else ():
        measure_engines(size, arguments, report)
    if "training" in arguments.parts.split(","):
        measure_training(arguments, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
