"""What a run was made with: versions of packages, Python and the machine's system, and the commit of the code around it."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

#: Packages that change what a run computes; those that are not installed are left out.
_PACKAGES = ("rollwright", "torch", "transformers", "tokenizers", "numpy", "safetensors", "peft", "ray", "sglang", "vllm")
_GIT_SECONDS = 5.0


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions of those packages that are installed, and of Python."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "Python": platform.python_version()}


def system() -> str:
    """Return the name, release and architecture of the machine's system."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def software(directory: Path | None = None) -> dict[str, str]:
    """Return ``versions``, the ``system``, and the ``commit`` of the Git repository around a directory, if there is one.

    Args:
        directory: the directory; the current one if None. Its commit ends with ``-dirty`` if tracked files have uncommitted changes.
    """
    found = {**versions(), "system": system()}
    commit = _commit(Path.cwd() if directory is None else directory)
    return {**found, "commit": commit} if commit else found


def _commit(directory: Path) -> str:
    asked = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    command = ["git", "--no-optional-locks", "-C", str(directory), *asked]
    try:
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""  # no git, or too large a work tree
    return answer.stdout.strip() if answer.returncode == 0 else ""
