"""``rollwright doctor``: check this machine for what runs need, with advice about what is missing.

Each check is a function that returns findings; a finding has a state:

* ``ok``: nothing to do;
* ``note``: works but could be better, or is only needed by some runs;
* ``problem``: runs will fail here, and the command exits with 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import typer

from rollwright import __version__
from rollwright.compat import EXTRAS
from rollwright.errors import RollwrightError
from rollwright.tracking import software

GIB = 1 << 30
#: With less, even a run with a small model is likely to fail.
_LITTLE_MEMORY, _LITTLE_DISK = 2 * GIB, 1 * GIB
#: Packages without which nothing runs.
_NEEDED = ("torch", "transformers", "datasets", "numpy")
#: Default ports of servers that users start by hand.
_PORTS = {30000: "rollwright serve-model, SGLang", 8000: "vLLM"}
#: Purpose of each extra, short enough to fit with the install command in eighty columns.
_EXTRAS = {
    "agentscope": "ReAct agents",
    "dense": "large dense search",
    "grammar": "output by schema",
    "lora": "LoRA checkpoints",
    "math": "math rewards",
    "mlflow": "metric sink",
    "notebook": "the example notebook",
    "openai": "clients in workflows",
    "optimizers": "8- and 4-bit AdamW",
    "plots": "pictures of curves",
    "postgresql": "PostgreSQL store",
    "ray": "cluster.kind: ray",
    "reasoning-gym": "its tasks",
    "retrieval": "rollwright retrieve",
    "sandbox": "a model's Python",
    "server": "serve-model, fronts",
    "store": "experience store",
    "tensorboard": "metric sink",
    "trackio": "metric sink",
    "view": "rollwright view",
    "vision": "images",
    "wandb": "metric sink",
}
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    name: str
    state: Literal["ok", "note", "problem"]
    found: str
    advice: str = ""


def _noted(topic: str, name: str, found: str, advice: str) -> Finding:
    """Return a ``note`` finding if there is advice, otherwise an ``ok`` one."""
    return Finding(topic, name, "note" if advice else "ok", found, advice)


def doctor(
    fileroot: Path = typer.Option(  # noqa: B008 - how typer declares an option
        Path("runs"), help="Directory of runs (cluster.fileroot)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
    gpu: bool = typer.Option(
        False, "--gpu", help="Try engines, servers, publications and runs on this machine's GPUs (docs/scale.md)."
    ),
    short: bool = typer.Option(False, "--short", help="With --gpu: only what takes a minute on a CPU."),
    only: str = typer.Option("", "--only", help="With --gpu: names of checks, separated by commas."),
    minutes: float = typer.Option(45.0, "--minutes", help="With --gpu: limit of all checks together.", min=0.1),
    vllm_python: str | None = typer.Option(None, "--vllm-python", help="With --gpu: interpreter of vLLM's environment."),
    sglang_python: str | None = typer.Option(None, "--sglang-python", help="With --gpu: interpreter of SGLang's environment."),
) -> None:
    """Check this machine: versions, processors, memory, GPU, ports, directories, extras; with advice for each.

    With `--gpu`, try what needs a GPU instead, each check in a process of its own. `report.json` and a table are written to
    `gpu-check` in the directory of runs.
    """
    if gpu:
        from rollwright.cli.gpu_check import check_gpu, this_place

        named = {"vllm": vllm_python, "sglang": sglang_python}
        pythons = {name: python for name, python in named.items() if python}
        place = this_place((fileroot / "gpu-check").absolute(), is_short=short, pythons=pythons)
        names = [name.strip() for name in only.split(",") if name.strip()]
        raise SystemExit(int(not check_gpu(place, only=names, minutes=minutes)))
    findings = [
        *versions(), *processors(), *memory(), *gpus(), *ports(), *directories(fileroot), *sandbox(), *extras(),
    ]  # fmt: skip
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    raise SystemExit(int(any(finding.state == "problem" for finding in findings)))


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=False)
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[bold red]problem[/]"}
    for topic in dict.fromkeys(finding.topic for finding in findings):
        table = Table(title=topic, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
        for _ in ("name", "state", "found"):
            table.add_column(overflow="fold")
        rows = [each for each in findings if each.topic == topic]
        if topic == "Extras" and (there := [each.name for each in rows if each.state == "ok"]):
            rows = [Finding(topic, "installed", "ok", ", ".join(there)), *(each for each in rows if each.state != "ok")]
        room = console.width - sum(
            max(map(len, words)) + 2 for words in zip(*((row.name, row.state) for row in rows), strict=True)
        )
        for row in rows:
            before = "  " if len(f"{row.found}  → {row.advice}") <= room else "\n"
            advice = f"{before}[dim]→ {escape(row.advice)}[/]" if row.advice else ""
            table.add_row(escape(row.name), marks[row.state], escape(row.found) + advice)
        console.print(table)
        console.print()
    problems = sum(finding.state == "problem" for finding in findings)
    console.print(
        f"{problems} problem{'s' * (problems != 1)}: runs will fail until they are solved." if problems else "Ready to run."
    )


def versions() -> Iterator[Finding]:
    """Check Python, Rollwright, and packages whose versions matter."""
    topic = "Versions"
    python = platform.python_version()
    if sys.version_info < (3, 11):  # noqa: UP036 - it may be run from a checkout by any interpreter
        yield Finding(topic, "Python", "problem", python, "Rollwright needs 3.11 or later.")
    else:
        yield Finding(topic, "Python", "ok", f"{python} at {sys.executable}")
    yield Finding(topic, "Rollwright", "ok", f"{__version__} at {Path(__file__).parents[1]}")
    yield Finding(topic, "System", "ok", software.system())
    installed = software.versions(_NEEDED)
    for name in _NEEDED:
        if name in installed:
            yield Finding(topic, name, "ok", installed[name])
        else:
            yield Finding(topic, name, "problem", "not installed", f"pip install {name}, or install Rollwright again.")


def processors() -> Iterator[Finding]:
    """Check the usable processors and the number of compute threads."""
    topic = "Processors"
    present = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    found = f"{usable} of {present} usable" if usable < present else str(present)
    quota = _cpu_quota()
    advice = ""
    if quota is not None and quota < usable:
        advice = f"The container gives {quota:g} processors' time: set cluster.threads to {max(1, int(quota))}."
        found += f", {quota:g} by quota"
    yield _noted(topic, "Processors", found, advice)
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding(topic, "Threads", "problem", f"torch cannot be loaded: {error}", "Install torch again, for this machine.")
        return
    threads, said = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    found = f"{threads} of torch" + (f", by OMP_NUM_THREADS={said}" if said else "")
    advice = ""
    if threads > usable:
        advice = f"More threads than processors wait for each other: set OMP_NUM_THREADS={usable}."
    elif os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE" and usable <= 4:
        advice = "Where a second process computes here, set OMP_WAIT_POLICY=PASSIVE: threads that spin slow it down ten times. A run that begins on a busy machine does so itself."
    yield _noted(topic, "Threads", found, advice)


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def _cpu_quota() -> float | None:
    """Return the processor quota of the container, or None if there is no limit or it cannot be read."""
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() else None


def memory() -> Iterator[Finding]:
    """Check memory and shared memory."""
    topic = "Memory"
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = (os.sysconf(name) * page for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
        if available := re.search(r"MemAvailable:\s+(\d+)", _text("/proc/meminfo")):  # includes memory that caches would free
            free = int(available[1]) << 10
    except (OSError, ValueError):
        yield Finding(topic, "Memory", "note", "cannot be read here")
        return
    if (limit := _text("/sys/fs/cgroup/memory.max").strip()).isdigit():
        total = min(total, int(limit))
    found = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB free"
    advice = "Training in float32 takes 16 bytes a parameter: use a small model."
    yield _noted(topic, "Memory", found, advice if total < _LITTLE_MEMORY else "")
    shared = Path("/dev/shm")
    if shared.is_dir():
        space = shutil.disk_usage(shared).free
        advice = "Weights reach servers through it: give the container more (--shm-size), or use rollout.weight_update: disk."
        yield _noted(topic, str(shared), f"{space / GIB:.1f} GiB free", advice if space < GIB else "")


def gpus() -> Iterator[Finding]:
    """Check the GPUs, and whether this torch can use them."""
    topic = "GPU"
    try:
        import torch
    except (ImportError, OSError):
        return  # reported with the processors
    has_driver = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()
    if not torch.cuda.is_available():
        build = f"torch {torch.__version__} is built for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'the CPU'}"
        if has_driver:
            advice = "There is an NVIDIA driver: install a torch that is built for its CUDA version, and look at CUDA_VISIBLE_DEVICES."
            yield Finding(topic, "GPU", "problem", f"not usable; {build}", advice)
        else:
            yield Finding(topic, "GPU", "ok", f"none; {build}, and everything runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found = f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        advice = "Another process holds most of its memory: end it, or choose another GPU by CUDA_VISIBLE_DEVICES."
        yield _noted(topic, f"GPU {index}", found, advice if free <= total / 2 else "")
    if not torch.cuda.is_bf16_supported():
        yield Finding(topic, "bfloat16", "note", "not supported", "Train in float32 (actor.dtype: float32).")


def ports() -> Iterator[Finding]:
    """Check the default ports of servers that are started by hand; runs find free ports themselves."""
    topic = "Network"
    for port, users in _PORTS.items():
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError as error:
                yield Finding(topic, f"Port {port}", "note", f"taken ({error.strerror})", f"Give --port to {users}.")
            else:
                yield Finding(topic, f"Port {port}", "ok", f"free ({users})")
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    found = f"{soft}, may be raised to {'any number' if unlimited else hard}"
    advice = "Each request to a server is a connection: raise the limit (ulimit -Hn 65536)."
    yield _noted(topic, "Open files", found, advice if not unlimited and hard < 4096 else "")


def directories(fileroot: Path) -> Iterator[Finding]:
    """Check the directories that runs write to."""
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    for name, path, how in [
        ("Runs", fileroot, "Choose another with cluster.fileroot."),
        ("Temporary files", Path(tempfile.gettempdir()), "Choose another with TMPDIR."),
        ("Hugging Face cache", cache, "Choose another with HF_HOME."),
    ]:
        place = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        try:
            with tempfile.TemporaryFile(dir=place):
                free = shutil.disk_usage(place).free
        except OSError as error:
            yield Finding("Directories", name, "problem", f"{path} cannot be written: {error.strerror}", how)
            continue
        found = f"{path}, {free / GIB:.1f} GiB free"
        yield _noted(
            "Directories", name, found, f"A checkpoint takes 12 bytes a parameter. {how}" if free < _LITTLE_DISK else ""
        )


def sandbox() -> Iterator[Finding]:
    """Check the sandbox for Python code written by a model."""
    from rollwright.processes.sandbox import check_sandbox

    try:
        check_sandbox("bubblewrap")
    except RollwrightError as error:
        yield Finding("Sandbox", "bubblewrap", "note", "not usable; only runs whose model writes Python need it", str(error))
    else:
        yield Finding("Sandbox", "bubblewrap", "ok", shutil.which("bwrap") or "found")


def extras() -> Iterator[Finding]:
    """Check the optional dependencies."""
    try:
        asked = metadata.distribution("rollwright").requires or []
    except metadata.PackageNotFoundError:
        yield Finding("Extras", "rollwright", "note", "not installed, run from its files", "pip install -e . in the checkout.")
        return
    needed: dict[str, list[str]] = {}
    for line in asked:
        if (extra := _EXTRA.search(line)) and extra[1] not in ("all", "test", "dev", "docs"):
            needed.setdefault(extra[1], []).append(re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0])
    for extra, packages in sorted(needed.items()):
        missing = [name for name in packages if name.lower() != "rollwright" and not _is_installed(name)]
        purpose = {**_EXTRAS, **EXTRAS}.get(extra) or ", ".join(packages)
        yield _noted("Extras", extra, purpose, f"pip install 'rollwright[{extra}]'" if missing else "")


def _is_installed(package: str) -> bool:
    return any(True for _ in metadata.distributions(name=package))
