"""``rollwright doctor --gpu``: what the tests cannot show without a GPU, tried on this machine.

``CHECKS`` is the table: each check is a function that runs in a process of its own (``check_processes.py``). On a machine without a GPU
the checks that can run on a CPU do, and the others are skipped with the reason.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollwright.atomic import write_json, write_text
from rollwright.cli.check_processes import CheckOutcome, CheckPlace, MachineCheck, run_checks
from rollwright.errors import ConfigError, RollwrightError
from rollwright.processes.tree import descendants
from rollwright.tracking import software
from rollwright.tracking.metrics_file import read_metrics

#: Families whose positions, windows, caps and sinks differ; ``llama`` and a window in the short form.
_FAMILIES = ("llama", "gpt2", "mistral", "qwen2", "gemma2", "gemma3_text", "olmo3", "gpt_oss", "phi3+longrope")
#: The quickstart with the smallest batches that pass through every stage. vLLM and SGLang have no attention for heads of 32, and vLLM's CPU
#: build keeps a packed copy of a tied head.
_SHAPE = ("stages.model.head_dim=64", "stages.model.tie_embeddings=false", "deterministic=false")
_SMALL = (
    *("stages.warmup.total_train_steps=2", "stages.warmup.train_dataset.batch_size=8", "stages.warmup.evaluator.limit=4"),
    *(f"stages.{stage}.{key}" for stage in ("before", "after") for key in ("dataset.limit=4", "samples=1")),
    *("stages.grpo.train_dataset.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=8"),
    "stages.grpo.evaluator.limit=4",
)
_STEPS, _STEPS_WITH_KILL = 3, 8
_POLL_SECONDS = 0.5


# -- what checks need ----------------------------------------------------------------------------------------------------


def this_place(directory: Path, *, is_short: bool = False, pythons: dict[str, str] | None = None) -> CheckPlace:
    """Look at this machine.

    Args:
        directory: for what the checks write.
        is_short: run the short form.
        pythons: interpreters of the environments of ``vllm`` and ``sglang``. By default this one, or ``.venv-vllm`` and ``.venv-sglang`` of
            the checkout.

    Raises:
        ConfigError: a named interpreter has no such server.
    """
    import torch

    checkout = Path(__file__).parents[3]
    root = checkout if (checkout / "benchmarks" / "publication.py").exists() else None
    found, versions = {}, {}
    for server in ("vllm", "sglang"):
        named = (pythons or {}).get(server)
        local = [root / f".venv-{server}" / "bin" / "python"] if root else []
        for python in [named] if named else [sys.executable, *map(str, local)]:
            if version := _server_version(python, server):
                found[server], versions[server] = python, version
                break
        else:
            if named:
                raise ConfigError(
                    f"--{server}-python {named}: it has no {server}. Install {server} there, or leave the option out."
                )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return CheckPlace(str(directory), "cuda" if gpus else "cpu", gpus, is_short, found, versions, str(root) if root else None)


def _server_version(python: str, server: str) -> str:
    code = (
        "from importlib import metadata\n"
        f"for name in ({server!r}, {server + '-cpu'!r}):\n"
        "    if any(metadata.distributions(name=name)):\n"
        "        print(name, metadata.version(name)); break"
    )
    try:
        return subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def missing(need: str, place: CheckPlace) -> str:
    """Return why this machine lacks what a check needs, or "" if it has it."""
    if need == "a checkout":
        if place.checkout is None:
            return "needs a checkout of the repository"
        return "" if importlib.util.find_spec("pytest") else "needs the packages of the tests: pip install 'rollwright[dev]'"
    if need == "a GPU":
        return "" if place.gpus else "needs a GPU"
    if need == "two GPUs":
        return "" if place.gpus > 1 else f"needs two GPUs, and there {'is 1' if place.gpus else 'is none'}"
    if need == "two GPUs or none":
        return "needs two GPUs, and there is 1" if place.gpus == 1 else ""
    if need not in place.pythons:
        return f"{need} is not installed; name the interpreter of its environment with --{need}-python"
    if need == "sglang" and not place.gpus:
        return "SGLang needs a GPU"
    return ""


# -- the checks ----------------------------------------------------------------------------------------------------------


def compare_families(place: CheckPlace, names: Sequence[str]) -> dict[str, Any]:
    """Compare the built-in engine and the trainer with the untouched forward of each model family, on the device."""
    answer = Path(place.directory, "families.json")
    names = names[:2] if place.is_short else names
    _carry_out([sys.executable, "-m", "tests.truth.table", "--device", place.device, "--json", str(answer), *names], place)
    found: dict[str, dict[str, str]] = json.loads(answer.read_text())
    wrong = {
        name: cells for name, cells in found.items() if any("off by" in cell or "wrong" in cells for cell in cells.values())
    }
    if wrong:
        raise RollwrightError(f"other log-probabilities than the untouched forward's: {wrong}")
    return {"families": len(found), "equal": sum(set(cells.values()) <= {"equal"} for cells in found.values())}


def run_quickstart(
    place: CheckPlace, keys: Sequence[str] = (), *, backend: str = "builtin", whole: bool = False, kill: bool = False
) -> dict[str, Any]:
    """Run the quickstart, whose publications are audited; with ``kill``, its server is killed after the second step.

    Args:
        place: see ``CheckPlace``.
        keys: further keys of the config.
        backend: engine of the stage that trains.
        whole: run all steps; the model has to be better afterwards.
        kill: kill the server.
    """
    root = Path(place.directory, "runs")
    shutil.rmtree(root, ignore_errors=True)
    steps = _STEPS_WITH_KILL if kill else _STEPS
    words = [*quickstart_keys(place, backend, None if whole else steps), *keys, f"cluster.fileroot={root}"]
    command = [sys.executable, "-m", "rollwright", "run", "quickstart", *words]
    directory = root / "quickstart" / "trial"
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    killed = _kill_server(process, directory / "grpo" / "metrics.jsonl") if kill else {}
    if status := process.wait():
        raise RollwrightError(f"the run ended with exit status {status}")
    figures = {"seconds_of_run": round(time.monotonic() - began, 1), **killed, **_figures(directory / "grpo" / "metrics.jsonl")}
    if not whole and figures["steps"] != steps:
        raise RollwrightError(f"the run made {figures['steps']} steps of {steps}")
    if whole:
        scores = json.loads((directory / "summary.json").read_text())["eval"]
        figures |= {"greedy_before": scores["before"]["greedy"], "greedy_after": scores["after"]["greedy"]}
        if figures["greedy_after"] < figures["greedy_before"] + 0.2:
            raise RollwrightError(f"the model has not learned: {figures}")
    return figures


def quickstart_keys(place: CheckPlace, backend: str, steps: int | None) -> list[str]:
    """Return the keys of a run of the quickstart. On one GPU, SGLang and vLLM take turns with the trainer.

    Args:
        place: see ``CheckPlace``.
        backend: engine of the stage that trains.
        steps: its steps, with small batches; None runs the whole quickstart.
    """
    small = [] if steps is None else [*_SMALL, f"stages.grpo.total_train_steps={steps}"]
    return [*_SHAPE, *small, f"stages.warmup.model.device={place.device}", *_engine_keys(place, backend)]


def _engine_keys(place: CheckPlace, backend: str) -> list[str]:
    keys = {"actor.device": place.device, "rollout.backend": backend}
    if backend in place.pythons:
        keys[f"{backend}.python"] = place.pythons[backend]
        if place.gpus == 1:
            keys["rollout.colocate"] = "true"
        if not place.gpus:
            keys |= {"vllm.device": "cpu", "vllm.dtype": "float32", "vllm.max_model_len": "128", "vllm.max_num_seqs": "32"}
        else:
            keys["sglang.mem_fraction_static" if backend == "sglang" else "vllm.gpu_memory_utilization"] = "0.3"
    return [f"stages.grpo.{name}={value}" for name, value in keys.items()]


def _figures(metrics: Path) -> dict[str, Any]:
    steps = [record for record in read_metrics(metrics) if "step" in record]
    figures: dict[str, Any] = {"steps": max(record["step"] for record in steps)}
    for name, metric, choose in (
        ("largest_difference_nats", "actor/logprob_difference/probe", max),
        ("publish_seconds", "seconds/publish", min),
        ("sampled_tokens_per_second", "tokens_per_second/generate", max),
        ("trained_tokens_per_second", "tokens_per_second/train", max),
    ):
        if values := [record[metric] for record in steps if record.get(metric) is not None]:
            figures[name] = float(f"{choose(values):.3g}")
    return figures


def _kill_server(run: subprocess.Popen[Any], metrics: Path) -> dict[str, Any]:
    """Kill the run's server as soon as the second step is recorded."""
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 2:
        if run.poll() is not None:
            raise RollwrightError(f"the run ended with exit status {run.returncode} before its server was killed")
        time.sleep(_POLL_SECONDS)
    servers = [pid for pid in descendants(run.pid) if _is_server(pid)]
    if not servers:
        raise RollwrightError("the run has no server to kill")
    os.kill(servers[0], 9)
    return {"killed_after_step": 2}


def _is_server(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
    return b"--port" in words and not any(b"ends_with_parent" in word for word in words)  # the server, not its supervisor


def compare_engines(place: CheckPlace, backend: str) -> dict[str, Any]:
    """Sample the same requests from a server and the built-in engine, and compare the log-probabilities of both with transformers'."""
    import torch
    from transformers import AutoModelForCausalLM

    from rollwright.config.generation import GenerationHyperparameters
    from rollwright.config.sections import RolloutConfig
    from rollwright.config.servers import BACKENDS, SGLangConfig, VLLMConfig
    from rollwright.data.tokenizer import build_character_tokenizer
    from rollwright.inference.backends.builtin.engine import BuiltinEngine
    from rollwright.inference.remote import RemoteInferenceEngine
    from rollwright.inference.request import ModelRequest
    from rollwright.placement.local_servers import LocalServers
    from rollwright.training.model import new_model

    on_gpu, path = place.gpus > 0, Path(place.directory, "model")
    sizes: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4} if on_gpu else {}
    tokenizer = build_character_tokenizer()
    new_model(path, tokenizer=tokenizer, head_dim=64, tie_word_embeddings=False, **sizes)
    tokenizer.save_pretrained(path)
    count, tokens = (256, 128) if on_gpu else (16, 16)
    gconfig = GenerationHyperparameters(max_new_tokens=tokens, temperature=0.7, ignore_eos=True)
    requests = [ModelRequest([6 + i % 90, 7, 8 + i % 7], gconfig=gconfig, rid=f"{i}", seed=i) for i in range(count)]
    python = place.pythons.get(backend)
    sections: dict[str, Any] = {
        "vllm": VLLMConfig(python=python, gpu_memory_utilization=0.3)
        if on_gpu
        else VLLMConfig(python=python, device="cpu", dtype="float32", max_model_len=256, max_num_seqs=32),
        "sglang": SGLangConfig(python=python, mem_fraction_static=0.3),
    }
    config = RolloutConfig(backend=backend, setup_timeout=300)

    def load(dtype: torch.dtype) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        return model.to(place.device)

    async def together(engine: Any) -> tuple[float, list[Any]]:
        began = time.perf_counter()
        responses = await asyncio.gather(*(engine.agenerate(request) for request in requests))
        return time.perf_counter() - began, responses

    figures: dict[str, Any] = {}
    answers: dict[str, list[Any]] = {}
    with LocalServers(config, model_path=str(path), logs=Path(place.directory, "logs"), **sections) as servers:
        client = RemoteInferenceEngine(BACKENDS.get(backend), config, addresses=servers.addresses)
        client.initialize()
        asyncio.run(together(client))  # compiles what is compiled at the first request
        seconds, answers[backend] = asyncio.run(together(client))
        client.destroy()
    figures[f"{backend}_tokens_per_second"] = round(count * tokens / seconds)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with BuiltinEngine(load(dtype), tokenizer) as engine:
        engine.generate(requests)
        began = time.perf_counter()
        answers["builtin"] = engine.generate(requests)
        figures["builtin_tokens_per_second"] = round(count * tokens / (time.perf_counter() - began))
    exact = load(torch.float32).eval()
    for name, responses in answers.items():
        apart = [_distance(exact, response, gconfig.temperature) for response in responses]
        figures[f"{name}_mean_difference_nats"] = float(f"{sum(apart) / len(apart):.2g}")
        if not sum(apart) / len(apart) < (0.05 if on_gpu else 1e-3):
            raise RollwrightError(f"the log-probabilities of {name} are not those of the model: {figures}")
    return figures


def _distance(model: Any, response: Any, temperature: float) -> float:
    """Return the mean distance of a response's log-probabilities from those of a plain forward, in nats."""
    import torch

    ids = torch.tensor([response.input_tokens + response.output_tokens], device=model.device)
    with torch.inference_mode():
        logprobs_TV = (model(ids).logits[0, len(response.input_tokens) - 1 : -1].double() / temperature).log_softmax(-1)
    output = torch.tensor(response.output_tokens, device=model.device)
    own = logprobs_TV.gather(1, output[:, None])[:, 0].cpu()
    return float((own - torch.tensor(response.output_logprobs, dtype=torch.float64)).abs().mean())


def time_publications(place: CheckPlace) -> dict[str, Any]:
    """Measure how long weights take to the built-in engine and to ``serve-model``, by each way."""
    answer = Path(place.directory, "publication.json")
    quick = [] if place.gpus else ["--quick", "--repeats", "1"]
    _carry_out([sys.executable, "benchmarks/publication.py", "--device", place.device, "--json", str(answer), *quick], place)
    return {f"{row['way']}_seconds": row["seconds"] for row in json.loads(answer.read_text())["results"]}


def _carry_out(command: list[str], place: CheckPlace) -> None:
    """Run a command in the checkout; its output is the check's."""
    if status := subprocess.run(command, cwd=place.checkout, stdin=subprocess.DEVNULL).returncode:
        raise RollwrightError(f"{' '.join(command[1:3])} ended with exit status {status}")


def _published(backend: str, way: str) -> MachineCheck:
    needs = () if backend == "builtin_process" else (backend,)
    if way == "xccl" and needs:
        needs = (backend, "two GPUs")  # NCCL has one rank on a GPU
    return MachineCheck(
        f"publish {backend} {way}",
        f"weights reach {_SHOWN[backend]} by {way}: each publication is audited",
        run_quickstart,
        {"backend": backend, "keys": [f"stages.grpo.rollout.weight_update={way}"]},
        needs,
        in_short=(backend, way) == ("builtin_process", "shared"),
    )


_SHOWN = {"builtin_process": "serve-model", "sglang": "SGLang", "vllm": "vLLM"}
_LORA = ["stages.grpo.actor.lora.rank=8"]
_COLOCATE = ["stages.grpo.rollout.colocate=true"]

#: The checks, the most important ones first.
CHECKS: tuple[MachineCheck, ...] = (
    MachineCheck(
        "families",
        "engine and trainer compute what transformers computes, by model family",
        compare_families,
        {"names": list(_FAMILIES)},
        ("a checkout",),
        600,
        in_short=True,
    ),
    MachineCheck(
        "quickstart builtin",
        "the built-in engine and training on the device; it learns",
        run_quickstart,
        {"whole": True},
        ("a GPU",),
        600,
    ),
    *(
        MachineCheck(
            f"engine {backend}",
            f"log-probabilities and tokens per second of {_SHOWN[backend]} and the built-in engine, against transformers",
            compare_engines,
            {"backend": backend},
            (backend,),
            420,
        )
        for backend in ("vllm", "sglang")
    ),
    *(_published(backend, "shared") for backend in _SHOWN),
    *(
        MachineCheck(
            f"colocated {backend}",
            f"{_SHOWN[backend]} and the trainer take turns on one GPU",
            run_quickstart,
            {"backend": backend, "keys": _COLOCATE},
            (backend, "a GPU") if backend != "builtin_process" else (),
        )
        for backend in _SHOWN
    ),
    *(
        MachineCheck(
            f"kill {backend}",
            f"a run goes on when its {_SHOWN[backend]} is killed",
            run_quickstart,
            {"backend": backend, "kill": True},
            (backend,) if backend != "builtin_process" else (),
            420,
        )
        for backend in _SHOWN
    ),
    *(
        MachineCheck(
            f"quickstart {backend}",
            f"the whole quickstart with {_SHOWN[backend]}; it learns",
            run_quickstart,
            {"backend": backend, "whole": True},
            (backend, "a GPU"),
            600,
        )
        for backend in ("sglang", "vllm")
    ),
    *(_published(backend, way) for way in ("disk", "xccl") for backend in _SHOWN),
    *(
        MachineCheck(
            f"adapter {backend}",
            f"LoRA adapters reach {_SHOWN[backend]}",
            run_quickstart,
            {"backend": backend, "keys": _LORA},
            (backend,) if backend != "builtin_process" else (),
        )
        for backend in _SHOWN
    ),
    MachineCheck(
        "ranks",
        "two ranks train one model (NCCL; Gloo on a CPU)",
        run_quickstart,
        {"backend": "builtin_process", "keys": ["cluster.processes=2"]},
        ("two GPUs or none",),
    ),
    MachineCheck("publication", "seconds of a publication by each way", time_publications, {}, ("a checkout",)),
)


# -- the command ---------------------------------------------------------------------------------------------------------


def check_gpu(place: CheckPlace, *, only: Iterable[str] = (), minutes: float = 45.0) -> bool:
    """Run the checks, print each outcome, and write ``report.json`` and ``table.md`` into the place's directory.

    Args:
        place: see ``this_place``.
        only: names of the checks to run; all by default, or those of the short form.
        minutes: time limit of all checks together.

    Returns:
        True if no check failed.

    Raises:
        ConfigError: there is no check of a name.
    """
    names = list(only)
    if unknown := [name for name in names if name not in {check.name for check in CHECKS}]:
        raise ConfigError(f"There is no check {unknown[0]!r}: choose among {', '.join(check.name for check in CHECKS)}.")
    chosen = [check for check in CHECKS if (check.name in names if names else check.in_short or not place.is_short)]
    report: dict[str, Any] = {"machine": machine(place), "checks": []}
    directory = Path(place.directory)
    directory.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for outcome in run_checks(chosen, place, missing, total_seconds=60 * minutes):
        outcomes.append(outcome)
        print(
            f"{outcome.state:<8}{outcome.name} ({outcome.seconds:.0f} s){': ' if outcome.why else ''}{outcome.why}", flush=True
        )
        report["checks"].append(asdict(outcome))
        write_json(directory / "report.json", report)  # after each, so that a machine that stops leaves what is known
        write_text(directory / "table.md", table(report["machine"], outcomes))
    print(f"report: {directory / 'report.json'}; table for docs/scale.md: {directory / 'table.md'}")
    return all(outcome.state != "failed" for outcome in outcomes)


def machine(place: CheckPlace) -> dict[str, Any]:
    """Return GPUs, driver and versions."""
    import torch

    from rollwright.inference.weights.group import nccl_version

    found: dict[str, Any] = {**software.software(), "servers": place.versions, "cuda": torch.version.cuda, "gpus": []}
    if place.gpus:
        found["nccl"] = nccl_version()
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(place.gpus)]
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            found["driver"] = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout.split("\n")[0].strip()
        except (OSError, subprocess.SubprocessError):
            found["driver"] = "unknown: nvidia-smi does not answer"
    return found


def table(machine: dict[str, Any], outcomes: Sequence[CheckOutcome]) -> str:
    """Return the outcomes as a Markdown table, below a line about the machine."""
    gpus = machine["gpus"]
    facts = [f"{len(gpus)} × {gpus[0]}, driver {machine['driver']}, NCCL {machine['nccl']}" if gpus else "no GPU"]
    facts += [f"{name} {machine[name]}" for name in ("torch", "transformers", "rollwright") if name in machine]
    lines = [", ".join([*facts, *machine["servers"].values()]), "", "| check | shows | result | figures |", "|---|---|---|---|"]
    for outcome in outcomes:
        figures = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in outcome.figures.items())
        result = f"passed in {outcome.seconds:.0f} s" if outcome.state == "passed" else outcome.state
        reason = outcome.why.split("\n")[0].replace("|", "\\|")
        lines.append(f"| {outcome.name} | {outcome.shows} | {result} | {figures or reason} |")
    return "\n".join(lines) + "\n"
