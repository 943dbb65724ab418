"""Models of the sizes that people train, on a CPU: SmolLM2-135M and Qwen2.5-0.5B, with random weights.

    python benchmarks/real_sizes.py [--sizes 135M,0.5B] [--parts load,engine,step] [--dtypes float32,bfloat16] [--rounds 3]
        [--vllm-python PATH] [--json FILE]

``load``: seconds from a checkpoint to an engine that answers. ``engine``: requests of forced length at temperature 1, all at once; prefill is
measured with one new token, and decode is the rest. Beside it vLLM's CPU build (``--vllm-python``; scripts/make_vllm_env.sh makes one)
and ``transformers.generate``, interleaved, each figure the best of its rounds. ``step``: a GRPO step beside TRL's (in an environment of its own, as
in grpo_step.py), medians, and one with LoRA with the peak of its memory. All sides compute with the same threads, and in the same type: steps in
float32, engines in each of ``--dtypes``.

Ratios, ours against theirs: ``engine/SIZE`` against vLLM, ``generate/SIZE``, both with ``-bfloat16`` for this type, ``step/135M`` and
``step/135M-long`` against TRL; ``peak_gib/0.5B``.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Report

#: Arguments of ``new_model``.
SHAPES: dict[str, dict[str, Any]] = {
    "135M": {
        "architecture": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "0.5B": {
        "architecture": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}
#: Requests, and the tokens of a prompt and of an answer.
REQUESTS = {"135M": (16, 128, 64), "0.5B": (8, 64, 16)}
#: Name -> size, groups, samples of a group, tokens of a prompt and of a completion, rank of LoRA, and the rows that TRL trains at once,
#: None if it does not run beside it. All 32 rows of ``135M-long`` at once took TRL more than 21 GB.
STEPS = {
    "135M": ("135M", 4, 8, 32, 64, 0, 32),
    "135M-long": ("135M", 4, 8, 256, 64, 0, 8),
    "135M-lora": ("135M", 4, 8, 32, 64, 16, None),
    "0.5B": ("0.5B", 2, 4, 128, 128, 16, None),
}


def measure_engines(name: str, dtype: str, path: Path, arguments: argparse.Namespace, report: Report) -> None:
    """Loading, prefill and decode of one size in one type."""
    import torch
    from generation import VLLMServer, engine_seconds, quiet, transformers_generate_seconds
    from transformers import AutoModelForCausalLM

    from rollwright.inference.backends.builtin.engine import BuiltinEngine

    count, prompt_tokens, new_tokens = REQUESTS[name]
    label = name if dtype == "float32" else f"{name}-{dtype}"
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, SHAPES[name]["vocab_size"], (count, prompt_tokens), generator=draw).tolist()
    begun = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    loaded = time.perf_counter()
    with BuiltinEngine(model, max_running_requests=count, kv_cache_bytes=1 << 30) as engine, quiet():
        engine_seconds(engine, prompts[:1], [1])
        ready = time.perf_counter()
        if "load" in arguments.parts:
            report.row(what=f"{label} load", side="transformers", seconds=loaded - begun)
            report.row(what=f"{label} load", side="rollwright, to the first token", seconds=ready - begun)
        if "engine" not in arguments.parts:
            return
        sides: dict[str, Callable[[list[int]], float]] = {
            "rollwright": lambda lengths: engine_seconds(engine, prompts, lengths),
            "generate": lambda lengths: transformers_generate_seconds(model, prompts, lengths, count),
        }
        threads = torch.get_num_threads()
        server = VLLMServer(arguments.vllm_python, model, threads) if arguments.vllm_python else contextlib.nullcontext()
        with server as vllm:
            if vllm is not None:
                sides["vllm"] = lambda lengths: vllm.seconds(prompts, lengths)
            best: dict[tuple[str, int], float] = {}
            for round_number in range(arguments.rounds + 1):  # the first is not counted
                for side, seconds in sides.items():
                    for length in (1, new_tokens):
                        took = seconds([length] * count)
                        if round_number:
                            best[side, length] = min(took, best.get((side, length), took))
    for side in sides:
        prefill, whole = best[side, 1], best[side, new_tokens]
        report.row(
            what=f"{label}, {count} × {prompt_tokens} + {new_tokens}",
            side=side,
            seconds=whole,
            prefill_tokens_per_second=count * prompt_tokens / prefill,
            decode_step_ms=1000 * (whole - prefill) / (new_tokens - 1),
            tokens_per_second=count * new_tokens / whole,
        )
    ours = best["rollwright", new_tokens]
    for side, ratio in (("vllm", f"engine/{label}"), ("generate", f"generate/{label}")):
        if side in sides:
            report.ratio(ratio, best[side, new_tokens] / ours)


def measure_step(name: str, arguments: argparse.Namespace, report: Report, versions: dict[str, str]) -> None:
    """A GRPO step, beside TRL's where it is compared."""
    from grpo_step import compare, make_environment, sides_of, write_inputs

    size, groups, group_size, prompt_tokens, new_tokens, rank, peer_rows = STEPS[name]
    has_peer = peer_rows is not None and arguments.trl
    peer = make_environment(arguments.environment) if has_peer else Path("none")
    with tempfile.TemporaryDirectory() as directory:
        tokens = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "max_position_embeddings": 1024}
        write_inputs(Path(directory), {**SHAPES[size], **tokens}, groups)
        sides = sides_of(peer, directory, [new_tokens, 1, arguments.steps, group_size, rank], peer_rows or 0)
        if not has_peer:
            sides.pop("trl")
        best = compare(report, name, sides, [arguments.threads], arguments.rounds, versions)
    if has_peer:
        report.ratio(f"step/{name}", best["trl"]["step"] / best["rollwright"]["step"])
    if size == "0.5B":
        report.ratio("peak_gib/0.5B", best["rollwright"]["peak_gib"])


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="135M,0.5B", help="which sizes, separated by commas")
    parser.add_argument("--parts", default="load,engine,step", help="what to measure, separated by commas")
    parser.add_argument("--dtypes", default="float32", help="types that the engines compute in, separated by commas")
    parser.add_argument("--steps", type=int, default=2, help="GRPO steps that count, in each round, after one that does not")
    parser.add_argument("--only", default=",".join(STEPS), help="which GRPO steps, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="times that the sides alternate")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of every side")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM's CPU build")
    parser.add_argument("--no-trl", dest="trl", action="store_false", help="our GRPO steps alone")
    parser.add_argument(
        "--environment", type=Path, default=Path(__file__).parents[1] / ".venv-trl", help="where TRL is, or is put"
    )
    parser.add_argument("--json", type=Path, help="write machine, results and ratios to this file")
    arguments = parser.parse_args()

    import torch

    from rollwright.training.model import new_model

    torch.set_num_threads(arguments.threads)
    report = Report("models of real sizes on a CPU")
    sizes, versions = arguments.sizes.split(","), dict[str, str]()
    if {"load", "engine"} & set(arguments.parts.split(",")):
        for name in sizes:
            with tempfile.TemporaryDirectory() as directory:
                new_model(directory, max_position_embeddings=1024, **SHAPES[name])
                for dtype in arguments.dtypes.split(","):
                    measure_engines(name, dtype, Path(directory), arguments, report)
    if "step" in arguments.parts.split(","):
        for name in arguments.only.split(","):
            if STEPS[name][0] in sizes:
                measure_step(name, arguments, report, versions)
    report.machine["versions"] = list(versions.values())
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
