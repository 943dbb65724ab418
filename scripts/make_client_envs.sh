#!/usr/bin/env bash
# Build the virtual environments with the clients of other projects that tests/clients runs, unmodified.
#
#   scripts/make_client_envs.sh [DIRECTORY]       .venv-clients, .venv-clients-openai2, .venv-clients-mcp2, .venv-clients-openenv,
#                                                 .venv-clients-verifiers3, .venv-clients-sources and .venv-clients-node in it (default:
#                                                 this repository)
#   scripts/make_client_envs.sh --lock            resolve the newest versions, and write their pins into constraints/
#
# PYTHON          interpreter that the environments are made from (default python3; needs 3.11 or newer)
# XDG_CACHE_HOME  where the packages of Node are kept, which clones of the repository share (default ~/.cache)
#
# They are environments of their own because the clients want other versions of what Rollwright uses. There are two because DSPy and
# verifiers pin older versions of openai and mcp than the others, a third with version 2 of the MCP SDK alone, of which agents want
# version 1, a fourth with the servers of OpenEnv, and a fifth with the last version of verifiers that has its classic environments.
# None of the clients computes with torch here, so torch is left out, and with it CUDA. Running it again does nothing where the
# environments are complete and the pins are the same.
#
# The last has the programs and packages of Node, 1.6 GB, with a Node of its own: npm installs it, of whatever version its Node is.
# Without npm it is left out, and its tests are skipped.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
lock=""
directory="$here"
if [[ "${1:-}" == "--lock" ]]; then lock=1; elif [[ -n "${1:-}" ]]; then directory="$1"; fi

requirements_of() {
  case "$1" in
    clients) printf '%s\n' openai anthropic openai-agents mcp 'pydantic-ai-slim[openai,anthropic]' langgraph langchain-openai \
      langchain-anthropic 'smolagents[openai]' 'agentscope>=2.0.9,<3' 'lm-eval[api]' transformers inspect-ai ;;
    clients-openai2) printf '%s\n' dspy 'verifiers>=0.4' mini-swe-agent ;;
    clients-mcp2) printf '%s\n' 'mcp>=2' ;;
    clients-openenv) printf '%s\n' openenv ;;
    clients-verifiers3) printf '%s\n' 'verifiers<0.4' ;;
  esac
}

lock_pins() {  # NAME PYTHON PINS
  local work uv
  work="$(mktemp -d)"
  requirements_of "$1" > "$work/requirements.txt"
  local left_out=(torch accelerate peft)
  [[ "$1" == clients-openai2 ]] && left_out+=(datasets)  # of mini-swe-agent's benchmarks
  printf '%s ; python_version < "3"\n' "${left_out[@]}" > "$work/left_out.txt"  # what no interpreter fulfils is left out
  uv="$(cd "$here/scripts" && "$2" -c 'from install import find_uv; print(find_uv() or "")')"
  [[ -n "$uv" ]] || { echo "uv is needed to resolve versions: pip install uv" >&2; exit 1; }
  echo "# Clients that tests/clients runs: written by scripts/make_client_envs.sh --lock" > "$work/pins.txt"
  "$uv" --quiet pip compile --python "$2" --override "$work/left_out.txt" --no-annotate --no-header "$work/requirements.txt" \
    >> "$work/pins.txt"
  mv "$work/pins.txt" "$3"
  rm -rf "$work"
}

for name in clients clients-openai2 clients-mcp2 clients-openenv clients-verifiers3; do
  environment="$directory/.venv-$name"
  pins="$here/constraints/$name.txt"
  stamp="$environment/.complete-$(sha256sum < "$pins" | cut -c 1-16)"
  if [[ -z "$lock" && -e "$stamp" ]]; then
    echo "$environment is complete"
    continue
  fi
  [[ -x "$environment/bin/python" ]] || "${PYTHON:-python3}" -m venv "$environment"
  if [[ -n "$lock" ]]; then
    lock_pins "$name" "$environment/bin/python" "$pins"
    continue
  fi
  rm -f "$environment"/.complete-*
  ROLLWRIGHT_TORCH=any "$environment/bin/python" "$here/scripts/install.py" --no-deps --requirement "$pins"  # there is no torch
  touch "$stamp"
  echo "$environment is complete"
done

# Workflow files of another system, which a test reads; they run in Rollwright's own environment, so nothing they depend on is installed.
sources="$directory/.venv-clients-sources"
pins="$here/constraints/clients-sources.txt"
stamp="$sources/.complete-$(sha256sum < "$pins" | cut -c 1-16)"
if [[ -z "$lock" && ! -e "$stamp" ]]; then
  rm -rf "$sources"
  "$directory/.venv-clients/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps --target "$sources" --requirement "$pins"
  touch "$stamp"
fi
echo "$sources is complete"

node_pins="$here/constraints/clients-node"
if ! command -v npm > /dev/null; then
  echo "There is no npm: the programs of Node are left out, and their tests are skipped." >&2
  exit 0
fi
if [[ -n "$lock" ]]; then
  newest="$(node -e 'console.log(Object.keys(require(process.argv[1]).dependencies).map((name) => name + "@latest").join(" "))' \
    "$node_pins/package.json")"
  # shellcheck disable=SC2086
  npm install --prefix "$node_pins" --package-lock-only --save-exact --omit-lockfile-registry-resolved --force $newest
  exit 0
fi
digest="$(cat "$node_pins/package.json" "$node_pins/package-lock.json" | sha256sum | cut -c 1-16)"
kept="${XDG_CACHE_HOME:-$HOME/.cache}/rollwright/clients-node-$digest"
environment="$directory/.venv-clients-node"
if [[ ! -e "$kept/.complete-$digest" ]]; then
  mkdir -p "$(dirname "$kept")"
  made="$(mktemp -d "$kept.XXXXXX")"  # renamed at the end: another clone may make the same at the same time
  trap 'rm -rf "$made"' EXIT
  chmod 755 "$made"
  cp "$node_pins/package.json" "$node_pins/package-lock.json" "$made"
  # Not npm ci, which refuses a lock that lacks optional packages of other platforms. Of all install scripts only those are run that
  # put a program where npm links it.
  npm install --prefix "$made" --ignore-scripts --no-audit --no-fund --loglevel=error
  (cd "$made" && npm rebuild --loglevel=error @anthropic-ai/claude-code opencode-ai)
  touch "$made/.complete-$digest"
  if [[ ! -e "$kept/.complete-$digest" ]]; then
    rm -rf "$kept"  # left by an interrupted installation
    mv "$made" "$kept"
  fi
fi
ln -sfn "$kept" "$environment"
echo "$environment is complete"
