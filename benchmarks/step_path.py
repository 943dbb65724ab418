"""How much code one training step runs through: distinct project files and functions.

One process, the default config, a single-turn workflow on two-digit sums, evaluation and saving off. After a few warm-up steps every
call of a project function is noted in every thread, from the end of one optimizer step to the end of the next. A comprehension or a
lambda belongs to the function around it.

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
_noting = False


def _note(frame: FrameType, event: str, argument: Any) -> None:
    if _noting and event == "call":
        _called.add(frame.f_code)


def _watch_optimizer() -> None:
    """Note calls from the end of optimizer step ``WARM_UP_STEPS`` to the end of the next."""
    import torch

    plain_step, done = torch.optim.AdamW.step, 0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        global _noting
        result = plain_step(*args, **kwargs)
        done += 1
        _noting = done == WARM_UP_STEPS
        return result

    torch.optim.AdamW.step = step  # type: ignore[method-assign]


def measure() -> dict[str, set[str]]:
    """Run the steps; the functions called, by project file."""
    threading.setprofile(_note)
    sys.setprofile(_note)
    from rollwright.cli.main import main

    _watch_optimizer()
    with tempfile.TemporaryDirectory() as root:
        config = Path(root) / "step_path.yaml"
        config.write_text(CONFIG.format(root=root, steps=WARM_UP_STEPS + 2))
        sys.argv = ["rollwright", "run", str(config)]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main()
    sys.setprofile(None)
    threading.setprofile(None)
    functions: dict[str, set[str]] = defaultdict(set)
    for code in _called:
        if code.co_filename.startswith(SOURCE):
            name = re.sub(r"(\.<locals>)?\.<(lambda|\w+comp|genexpr)>", "", code.co_qualname)
            functions[code.co_filename.removeprefix(SOURCE)].add(name)
    return functions


def run() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", action="store_true", help="print every function, by file")
    arguments = parser.parse_args()
    functions = measure()
    if not functions:
        sys.exit("No step was seen: the run failed, or its optimizer is not torch's AdamW. Run it with its output shown.")
    counts = {"files": len(functions), "functions": sum(map(len, functions.values()))}
    if arguments.list:
        for file, names in sorted(functions.items()):
            print(f"{file}: {len(names)}\n  " + "\n  ".join(sorted(names)))
    print(json.dumps(counts) if arguments.json else f"{counts['files']} files, {counts['functions']} functions")


if __name__ == "__main__":
    run()
