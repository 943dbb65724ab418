"""Install packages into the environment of this interpreter: with uv in seconds, or with pip where uv cannot be had.

    .venv/bin/python scripts/install.py -c constraints/cpu.txt -e '.[dev]'

takes what ``pip install`` takes. uv reads no configuration of pip's, so it is handed pip's indexes, find-links and certificate as
``pip config`` tells them, and looks at all indexes as pip does.

Where this machine has no NVIDIA GPU, torch has to be its CPU build: the CUDA build is several GB, and computes nothing here. If
the indexes offer only that one, uv is told to take PyTorch's CPU index; ROLLWRIGHT_TORCH=any installs whatever comes.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
#: Packages that only the CUDA build of torch asks for.
_CUDA = "nvidia-"


def pip_settings(listing: str) -> dict[str, list[str]]:
    """What ``pip config list`` says, by option: the environment wins over the section install, and that over global.

    >>> pip_settings("global.find-links='/a /b'\\n:env:.find-links='/c'")
    {'find-links': ['/c']}
    """
    found: dict[str, tuple[int, list[str]]] = {}
    for line in listing.splitlines():
        where, _, value = line.partition("=")
        section, _, option = where.strip().rpartition(".")
        rank = {"global": 0, "install": 1, ":env:": 2}.get(section)
        if rank is None or not value:
            continue
        text = str(ast.literal_eval(value.strip()))
        if rank >= found.get(option, (0, []))[0]:
            found[option] = rank, text.split()
    return {option: values for option, (_, values) in found.items()}


def uv_options(settings: Mapping[str, list[str]]) -> list[str]:
    """The options of ``uv pip install`` that do what pip's settings do."""
    options: list[str] = []
    for name in settings.get("index-url", [])[:1]:
        options += ["--default-index", name]
    for name in settings.get("extra-index-url", []):
        options += ["--index", name]
    for name in settings.get("find-links", []):
        options += ["--find-links", name]
    for name in settings.get("trusted-host", []):
        options += ["--allow-insecure-host", name]
    if settings.get("no-index", ["false"])[0].lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    return [*options, "--index-strategy", "unsafe-best-match"]  # pip's: the best version of all indexes


def has_nvidia_gpu() -> bool:
    """An NVIDIA driver is there."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def find_uv() -> str | None:
    """uv's program, got by pip where it is nowhere; None: it cannot be had."""
    beside = Path(sys.executable).with_name("uv")
    for place in (shutil.which("uv"), str(beside)):
        if place and Path(place).exists():
            return place
    got = subprocess.run([*PIP, "install", "--quiet", "uv"], capture_output=True, text=True)
    if got.returncode == 0 and beside.exists():
        return str(beside)
    print(f"uv cannot be had, so pip installs, which takes minutes: {_last_line(got.stderr)}", file=sys.stderr)
    return None


def install(arguments: list[str]) -> int:
    """Install by uv, else by pip; the exit status."""
    wants_cpu = os.environ.get("ROLLWRIGHT_TORCH") != "any" and not has_nvidia_gpu()
    uv = find_uv()
    status = 1 if uv is None else _install_with_uv(uv, arguments, wants_cpu)
    if status:
        status = subprocess.run([*PIP, "install", "--quiet", *arguments]).returncode
    if wants_cpu and not status:
        _check_torch()
    return status


def _install_with_uv(uv: str, arguments: list[str], wants_cpu: bool) -> int:
    settings = pip_settings(subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout)
    command = [uv, "pip", "install", "--python", sys.executable, *uv_options(settings)]
    environment = dict(os.environ)
    if certificate := settings.get("cert"):
        environment.setdefault("SSL_CERT_FILE", certificate[0])
    if wants_cpu:
        planned = subprocess.run([*command, "--dry-run", *arguments], capture_output=True, text=True, env=environment)
        if _CUDA in planned.stderr + planned.stdout:
            print(
                "The indexes offer torch's CUDA build alone: its CPU build is taken from PyTorch's own index.", file=sys.stderr
            )
            command += ["--torch-backend", "cpu"]
    done = subprocess.run([*command, "--quiet", *arguments], stderr=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        print(f"uv could not install, so pip does, which takes minutes. It said:\n{done.stderr.strip()}", file=sys.stderr)
    return done.returncode


def _check_torch() -> None:
    """Say where the torch that was installed is not the CPU build."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    if any((each.name or "").lower().startswith(_CUDA) for each in importlib.metadata.distributions()):
        print(
            f"torch {version} is a build for CUDA, and this machine has no NVIDIA GPU. It works, and takes several GB. For the CPU "
            "build point PIP_EXTRA_INDEX_URL to the index of PyTorch's CPU wheels (its install page names it), run `make clean`, and "
            "make again.",
            file=sys.stderr,
        )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason was given"])[-1]


if __name__ == "__main__":
    if sys.prefix == sys.base_prefix:
        sys.exit("This installs into a virtual environment: call it with the interpreter of one.")
    sys.exit(install(sys.argv[1:]))
