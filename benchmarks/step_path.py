"""Count the project files and functions that one training step runs through.

One process, the default config, a single-turn workflow on two-digit sums, no evaluation, no saving. After a few warm-up steps, the
script records every call of a project function in every thread, from the end of one optimizer step to the end of the next.
Comprehensions and lambdas belong to the function around them.

    python benchmarks/step_path.py            # both counts
    python benchmarks/step_path.py --json     # {"files": n, "functions": n}
    python benchmarks/step_path.py --list     # every function, by file
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SOURCE = str(Path(__file__).resolve().parents[1] / "src" / "rollwright") + "/"
WARM_UP_STEPS = 4

CONFIG = """
experiment_name: step-path
trial_name: trial
cluster: {{fileroot: {root}}}
stages:
  - {{name: model, kind: model, path: "${{run_dir}}/model", architecture: qwen3, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1,
     head_dim: 16, intermediate_size: 64, max_position_embeddings: 128, characters: "0123456789+-*= ", pieces: ["<answer>", "</answer>"]}}
  - name: grpo
    kind: rl
    actor: {{path: "${{run_dir}}/model", optimizer: {{}}}}
    workflow: rollwright.workflows.rlvr.RLVRWorkflow
    reward_fn: numeric_reward
    gconfig: {{n_samples: 4, max_new_tokens: 8}}
    train_dataset: {{path: arithmetic, split: train, batch_size: 8, kwargs: {{digits: 2}}}}
    total_train_steps: {steps}
"""

_called: set[CodeType] = set()
_recording = False
_steps = 0


def _record(frame: FrameType, event: str, argument: Any) -> None:
    if _recording and event == "call":
        _called.add(frame.f_code)


def _watch_optimizer() -> None:
    """Record calls from the end of optimizer step ``WARM_UP_STEPS`` to the end of the next."""
    import torch

    plain_step = torch.optim.AdamW.step

    def step(*args: Any, **kwargs: Any) -> Any:
        global _recording, _steps
        result = plain_step(*args, **kwargs)
        _steps += 1
        _recording = _steps == WARM_UP_STEPS
        return result

    torch.optim.AdamW.step = step  # type: ignore[method-assign]


def measure() -> dict[str, set[str]]:
    """Run the steps and return the functions called, by project file. Exits with the reason if there is no step to see."""
    import rollwright

    if not str(rollwright.__file__).startswith(SOURCE):
        sys.exit(
            f"This checkout's package is in {SOURCE}, but Python imports rollwright from {Path(str(rollwright.__file__)).parent}. Install "
            "the checkout (pip install -e .), or run with PYTHONPATH=src."
        )
    threading.setprofile(_record)
    sys.setprofile(_record)
    from rollwright.cli.main import main

    _watch_optimizer()
    output, status = io.StringIO(), None
    with tempfile.TemporaryDirectory() as root:
        config = Path(root) / "step_path.yaml"
        config.write_text(CONFIG.format(root=root, steps=WARM_UP_STEPS + 2))
        sys.argv = ["rollwright", "run", str(config)]
        with contextlib.redirect_stdout(output):
            try:
                main()
            except SystemExit as end:
                status = end.code
    sys.setprofile(None)
    threading.setprofile(None)
    if _steps <= WARM_UP_STEPS:
        print(output.getvalue(), file=sys.stderr)
        sys.exit(
            f"The run ended after {_steps} steps of torch's AdamW (exit status {status}), and {WARM_UP_STEPS + 1} are needed. Its output is "
            "above; if it trained, its optimizer is another one."
        )
    functions: dict[str, set[str]] = defaultdict(set)
    for code in _called:
        if code.co_filename.startswith(SOURCE):
            name = re.sub(r"(\.<locals>)?\.<(lambda|\w+comp|genexpr)>", "", code.co_qualname)
            functions[code.co_filename.removeprefix(SOURCE)].add(name)
    return functions


def run() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", action="store_true", help="print every function, by file")
    arguments = parser.parse_args()
    functions = measure()
    counts = {"files": len(functions), "functions": sum(map(len, functions.values()))}
    if arguments.list:
        for file, names in sorted(functions.items()):
            print(f"{file}: {len(names)}\n  " + "\n  ".join(sorted(names)))
    print(json.dumps(counts) if arguments.json else f"{counts['files']} files, {counts['functions']} functions")


if __name__ == "__main__":
    run()
