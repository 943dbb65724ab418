"""One GRPO step (sample, reward, advantages, update, publish) against TRL's GRPOTrainer on CPU.

    python benchmarks/grpo_step.py [--json FILE]

Both sides: the same model and prompts, 4 prompts × 8 samples, float32, completions of one forced length, every row trained,
one optimizer step. Each side runs with each number of threads, and its best counts. TRL runs in an environment of its own, which
this command makes the first time (.venv-trl beside the README); the two sides alternate, and a ratio is that of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Report

REPOSITORY = Path(__file__).resolve().parents[1]
GROUPS, GROUP_SIZE = 4, 8

_SMALL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "prompt_tokens": 32, "new_tokens": 32}
_MIDDLE = {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4, "prompt_tokens": 32, "new_tokens": 64}
_LARGE = {"vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "prompt_tokens": 32, "new_tokens": 64}
#: Name -> arguments of ``new_model``, and tokens of a prompt and of a completion.
SIZES: dict[str, dict[str, Any]] = {
    "0.13M": _SMALL,
    "3.9M": _MIDDLE,
    "31.5M": _LARGE,
    "3.9M-long": {**_MIDDLE, "prompt_tokens": 256},
    "31.5M-long": {**_LARGE, "prompt_tokens": 256},
}


def make_environment(directory: Path) -> Path:
    """The interpreter of an environment that has TRL, made where it is missing."""
    python, complete = directory / "bin" / "python", directory / ".complete"
    if not complete.exists():
        print(f"making {directory} with TRL (some minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*install, "torch==2.13.0+cpu"], check=False).returncode:
            raise SystemExit(
                "No CPU build of torch 2.13.0 is on the indexes that pip was given: set PIP_EXTRA_INDEX_URL to the index of "
                "PyTorch's CPU wheels (its install page names it), then run this again."
            )
        subprocess.run([*install, "trl", "-c", str(REPOSITORY / "constraints" / "cpu.txt")], check=True)
        complete.touch()
    return python


def word_tokenizer(vocabulary: int) -> Any:
    """A tokenizer of one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, vocabulary)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def write_inputs(directory: Path, size: dict[str, Any], groups: int = GROUPS) -> None:
    """A model, a tokenizer of one token a word, and prompts, in Hugging Face form."""
    import random

    from rollwright.training.model import new_model

    vocabulary = size["vocab_size"]
    shape = {name: value for name, value in size.items() if name not in ("prompt_tokens", "new_tokens")}
    new_model(directory, **{"tokenizer": word_tokenizer(vocabulary), "intermediate_size": 3 * size["hidden_size"], **shape})
    draw = random.Random(0)
    prompts = [" ".join(f"w{draw.randrange(2, vocabulary)}" for _ in range(size["prompt_tokens"])) for _ in range(groups)]
    (directory / "prompts.json").write_text(json.dumps(prompts))


class FixedLength:
    """A workflow: one completion of a forced length, rewarded by its tokens."""

    def __init__(self, new_tokens: int, eos_id: int) -> None:
        from rollwright import GenerationHyperparameters

        self.gconfig = GenerationHyperparameters(max_new_tokens=new_tokens, min_new_tokens=new_tokens, stop_token_ids=[eos_id])

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        """Sample and score one completion."""
        import torch

        from rollwright import ModelRequest

        response = await engine.agenerate(ModelRequest(input_ids=data["ids"], gconfig=self.gconfig))
        return {
            "input_ids": torch.tensor(response.input_tokens),
            "output_ids": torch.tensor(response.output_tokens),
            "reward": sum(response.output_tokens) % 7 / 7,
        }


def measure_ours(
    directory: Path, new_tokens: int, warmup: int, steps: int, group_size: int = GROUP_SIZE, lora_rank: int = 0
) -> dict[str, Any]:
    """Seconds of our steps and of their parts, and the peak of the process's memory."""
    import resource

    import torch
    from transformers import PreTrainedTokenizerFast

    from rollwright import __version__
    from rollwright.config.experiment import FinetuneSpec
    from rollwright.config.sections import LoraConfig, OptimizerConfig, PPOActorConfig, RolloutConfig
    from rollwright.rollout.engines import LocalRolloutEngine
    from rollwright.training.actor import FSDPPPOActor

    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)  # AutoTokenizer would make a BPE tokenizer of Qwen2's
    tasks = [{"ids": tokenizer.encode(prompt)} for prompt in json.loads((directory / "prompts.json").read_text())]
    lora = LoraConfig(rank=lora_rank) if lora_rank else None
    actor = FSDPPPOActor(PPOActorConfig(path=str(directory), device="cpu", optimizer=OptimizerConfig(lr=1e-6), lora=lora))
    actor.initialize(None, FinetuneSpec(1, len(tasks) * 100, len(tasks)))
    rollout_config = RolloutConfig(max_running_requests=len(tasks) * group_size, device="cpu")
    rollout = LocalRolloutEngine(rollout_config, model=actor.model, tokenizer=tokenizer, base_only=bool(lora_rank))
    rollout.initialize()
    actor.connect_engine(rollout)
    workflow = FixedLength(new_tokens, tokenizer.eos_token_id)
    seconds: dict[str, list[float]] = {"step": [], "generate": [], "train": [], "publish": []}
    for _ in range(warmup + steps):
        marks = [time.perf_counter()]
        batch = rollout.rollout_batch(tasks, workflow, group_size=group_size)
        marks.append(time.perf_counter())
        actor.compute_advantages(batch)
        stats = actor.ppo_update(batch)
        actor.step_lr_scheduler()
        marks.append(time.perf_counter())
        actor.update_weights()
        marks.append(time.perf_counter())
        for name, begin, end in (("generate", 0, 1), ("train", 1, 2), ("publish", 2, 3), ("step", 0, 3)):
            seconds[name].append(marks[end] - marks[begin])
        trained = batch["loss_mask"].sum(1)
        assert bool((trained == new_tokens).all()), f"completions of {trained.tolist()} tokens, not {new_tokens}"
        assert stats["groups_without_variance"] == 0
        assert stats["logprob_difference/max"] < 1e-3
    rollout.destroy()
    rows = int(batch["input_ids"].shape[0])
    return {
        **{name: values[warmup:] for name, values in seconds.items()},
        "rows": rows,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "version": f"Rollwright {__version__}, torch {torch.__version__}",
    }


def run_side(command: list[str], threads: int) -> dict[str, Any]:
    """The JSON object that a side prints last."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure both sides and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES), help="which sizes, separated by commas")
    parser.add_argument("--steps", type=int, default=5, help="steps that count, in each round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--rounds", type=int, default=2, help="times that the two sides alternate")
    parser.add_argument("--threads", default="1,2", help="numbers of compute threads that each side is tried with")
    parser.add_argument("--environment", type=Path, default=REPOSITORY / ".venv-trl", help="where TRL is, or is put")
    parser.add_argument("--json", type=Path, help="write machine, results and ratios to this file")
    parser.add_argument("--measure", nargs="+", metavar="DIRECTORY TOKENS WARMUP STEPS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        directory, *numbers = arguments.measure
        print(json.dumps(measure_ours(Path(directory), *map(int, numbers))))
        return

    report = Report("GRPO step, 4 prompts × 8 samples, seconds (median)")
    peer = make_environment(arguments.environment)
    versions: dict[str, str] = {}
    for name in arguments.sizes.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            write_inputs(Path(temporary), SIZES[name])
            numbers = [SIZES[name]["new_tokens"], arguments.warmup, arguments.steps]
            choices = [int(number) for number in arguments.threads.split(",")]
            best = compare(report, name, sides_of(peer, temporary, numbers), choices, arguments.rounds, versions)
        report.ratio(f"trl/{name}", best["trl"]["step"] / best["rollwright"]["step"])
        report.ratio(f"train/{name}", best["trl"]["train"] / best["rollwright"]["train"])
    report.machine["versions"] = list(versions.values())
    report.finish(arguments.json)


def sides_of(peer: Path, directory: str, numbers: list[int], peer_rows: int = 0) -> dict[str, list[str]]:
    """The command of each side: ``peer`` is the interpreter of TRL's environment; numbers are those of ``measure_ours``; TRL trains
    ``peer_rows`` rows at once (0: all)."""
    words = [directory, *map(str, numbers)]
    theirs = [str(peer), str(REPOSITORY / "benchmarks" / "peers" / "trl_grpo_step.py"), *words[:4], str(peer_rows)]
    return {"rollwright": [sys.executable, str(REPOSITORY / "benchmarks" / "grpo_step.py"), "--measure", *words], "trl": theirs}


def compare(
    report: Report, name: str, sides: dict[str, list[str]], threads: list[int], rounds: int, versions: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Let the sides alternate, add a row for each side and number of threads, and return the medians of each side's best."""
    measured: dict[tuple[str, int], dict[str, list[float]]] = {(side, n): {} for side in sides for n in threads}
    for _ in range(rounds):
        for (side, number), parts in measured.items():
            result = run_side(sides[side], number)
            versions[side] = result["version"]
            for part, values in result.items():
                if isinstance(values, list):
                    parts.setdefault(part, []).extend(values)
            parts.setdefault("peak_gib", []).append(result["peak_gib"])
    medians = {key: {part: statistics.median(values) for part, values in parts.items()} for key, parts in measured.items()}
    best: dict[str, dict[str, Any]] = {}
    for (side, number), parts in medians.items():
        parts.setdefault("train", parts["step"] - parts["generate"])
        columns = {part: parts.get(part) for part in ("step", "generate", "train", "publish", "peak_gib")}
        report.row(size=name, side=side, threads=number, **columns)
        if side not in best or parts["step"] < best[side]["step"]:
            best[side] = parts
    return best


if __name__ == "__main__":
    main()
