#!/usr/bin/env bash
# Build the wheel, install it into an empty environment away from this checkout, and use it as a new user would.
#
#   scripts/try_wheel.sh          PYTHON: the interpreter that the environment is made from (default python3)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false PYTHONPATH=

# Built from a copy: setuptools leaves its files where it builds, and would take up old ones.
mkdir "$work/source"
cp -r "$here"/{src,examples,pyproject.toml,README.md,LICENSE} "$work/source"
"${PYTHON:-python3}" -m venv "$work/env"
python="$work/env/bin/python"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work" "$work/source"
"$python" "$here/scripts/install.py" -c "$here/constraints/cpu.txt" "$work"/rollwright-*.whl

mkdir "$work/mine"
cd "$work/mine"
"$python" -c 'import sys, rollwright; assert rollwright.__file__.startswith(sys.prefix), rollwright.__file__'
for files in templates static; do  # of the viewer
  diff -r "$here/src/rollwright/viewer/$files" "$("$python" -c 'import rollwright; print(*rollwright.__path__)')/viewer/$files"
done
"$work/env/bin/rollwright" doctor
"$work/env/bin/rollwright" new workflow two_readers
"$work/env/bin/rollwright" run two_readers.yaml
test -n "$(ls runs/two_readers/first/grpo/checkpoints/final/*.safetensors)"
"$work/env/bin/rollwright" examples
"$work/env/bin/rollwright" run multi_turn --dry-run > /dev/null  # with a world of its own
"$work/env/bin/rollwright" run quickstart total_train_steps=2 gconfig.max_new_tokens=8 \
  stages.{before,after}.dataset.limit=16 stages.{before,after}.samples=2 stages.{warmup,grpo}.evaluator.limit=16
test -n "$(ls runs/quickstart/trial/grpo/checkpoints/final/*.safetensors)"
others="$("$python" -m pip list --format freeze | grep -vcE '^(pip|setuptools|uv|rollwright)==')"
echo "$("$python" --version): $(basename "$work"/rollwright-*.whl) works, with $others packages besides it"
test "$others" -le 60  # what the core may bring; look at what grew with: pip install pipdeptree && pipdeptree -p rollwright
