"""The Python of the documentation runs: a page's blocks one after the other, with what its text takes for granted.

A fork of the warm process (``tests/warm.py``) imports all public names, then each page runs in a fork of it, so that what a page
registers stays there.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import json
import os
import re
import sys
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    page.stem: blocks
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if (blocks := re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL))
}
#: (page, block) -> why it does not run here.
NOT_RUN = {
    ("agentscope", 0): "a sketch; tests/unit/workflows runs the built-in agent with the real package",
    ("boxes", 0): "bubblewrap is not everywhere; tests/unit/processes/test_documented_boxes.py runs this",
    ("bring-your-environment", 0): "tests/clients/test_openenv.py starts such a server, in an environment of its own",
    ("coming-from", 0): "its first line imports AReaL",
    ("engine", 1): "tests/unit/inference publishes to an engine between its steps",
    ("engine", 2): "tests/unit/inference/test_builtin_adapters.py samples with several adapters",
    ("experience-store", 0): "tests/integration/test_store_processes.py runs this loop in processes",
    ("experience-store", 1): "the same test",
    ("export", 0): "tests/unit/viewer/test_exports.py reads the files",
    ("lora", 0): "tests/unit/training/test_lora.py loads such a directory with peft",
    ("modes", 0): "tests/integration/test_serve.py sends these requests to a service",
    ("openai-front", 4): "tests/clients sends these requests with the real packages",
    ("openai-front", 5): "the same",
    ("openai-front", 6): "tests/unit/rollout/test_images_at_the_front.py sends images",
    ("openai-front", 8): "tests/unit/rollout/test_openai_front.py gives rewards",
    ("openai-front", 9): "the same",
    ("retrieval", 0): "tests/integration/test_retrieval_service.py asks a service",
    ("run-data", 0): "tests/unit/viewer reads a recorded run",
    ("run-data", 1): "tests/unit/viewer/test_reported.py makes such a table",
    ("sandbox", 1): "docker's daemon is not everywhere; tests/unit/processes/test_sandbox.py runs this",
    ("sequence-processing", 1): "its dataset and its sink are elsewhere",
    ("servers", 0): "tests/integration sends requests to real servers",
    ("servers", 1): "tests/integration/test_weight_updates.py does this with real servers",
    ("servers", 3): "the command needs GPUs",
    ("servers", 4): "tests/integration/test_vllm_server.py starts the real one",
}
MODEL = """
from rollwright import *
tokenizer = load_tokenizer("my-model")
gconfig = GenerationHyperparameters(max_new_tokens=8)
tasks = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1), "question": f"{n}+1="} for n in range(2)]
"""
ANSWERED = """
from rollwright.inference.request import ModelRequest
with BuiltinEngine("my-model") as _engine:
    answers = _engine.generate([ModelRequest([5, 6, 7], gconfig) for _ in range(2)])
one, another = (
    Experience(tokens=a.input_tokens + a.output_tokens, prompt_length=3, logprobs=a.output_logprobs, reward=1.0).to_trajectory()
    for a in answers
)
"""
#: Page -> code before its first block.
PRELUDES = {
    "configuration": """
open("agent.yaml", "w").write(
    "workflow: rlvr\\nreward_fn: numeric_reward\\nactor: {path: my-model}\\ntrain_dataset: {path: arithmetic, batch_size: 8}\\n"
)
""",
    "datasets": "rows = [{'question': str(n)} for n in range(64)]",
    "engine": "import shutil; shutil.copytree('my-model', 'path/or/name')",
    "parallel-generation": MODEL + "my_reward = lambda *positional, **columns: 1.0",
    "rewards": "source = 'print(6 * 7)'",
    "rollout": MODEL,
    "sandbox": """
import asyncio
from rollwright import REWARD_FUNCTIONS
from rollwright.processes.sandbox import run_python
source = "print(6 * 7)"
""",
    "search-agent": MODEL + f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r})",
    "sequence-processing": MODEL
    + "from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained('my-model')",
    "tracking": "turns, tokens, h, n, lengths = 3, 12, 0.5, 7, [3, 4, 5]",
    "training": MODEL
    + """
from rollwright.config.experiment import FinetuneSpec
config = GRPOConfig()
config.actor.path, config.rollout.path = "my-model", "my-model"
ft_spec = FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=2)
rollout = LocalRolloutEngine(config.rollout, tokenizer="my-model")
rollout.initialize()
workflow = RLVRWorkflow("numeric_reward", gconfig, tokenizer)
""",
    "own-loop": MODEL
    + """
from rollwright.config.experiment import FinetuneSpec
from rollwright.experience.trajectory import select_rows
config = GRPOConfig()
config.actor.path = "my-model"
actor = FSDPPPOActor(config.actor)
actor.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=2))
rollout = LocalRolloutEngine(config.rollout, actor.shared_model, tokenizer)
rollout.initialize()
actor.connect_engine(rollout)
loader = TaskLoader(tasks, 2)
workflow = RLVRWorkflow("numeric_reward", gconfig, tokenizer)
demonstrations = actor.sample(tasks, workflow)
""",
    "trajectories": MODEL + ANSWERED + "device = 'cpu'",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, tiny_model, warm):
    """Page -> what each block came to: "ran", or a traceback."""
    directory = tmp_path_factory.mktemp("pages")
    process = warm.run([__file__, directory, tiny_model], directory, timeout=300)
    assert process.returncode == 0, process.stderr
    return {page: json.loads((directory / page / "outcome.json").read_text()) for page in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, outcomes):
    wanted = {str(n): "ran" for n in range(len(PAGES[page])) if (page, n) not in NOT_RUN}
    assert outcomes[page] == wanted


def test_every_exception_names_a_block_that_is_there():
    assert [key for key in NOT_RUN if key[1] >= len(PAGES.get(key[0], ()))] == []


def run_page(page: str) -> dict[str, str]:
    """Run a page's blocks in the working directory."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(PRELUDES.get(page, ""), names)
    outcome = {}
    for number, block in enumerate(PAGES[page]):
        if (page, number) in NOT_RUN:
            continue
        try:
            if block == PAGES["workflows"][0]:
                import my_module  # as its text says: "Save them as my_module.py"  # noqa: F401

                outcome[str(number)] = "ran"
                continue
            code = compile(block, f"{page}.md, block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, names)  # noqa: S307 - the documentation's own code
            if inspect.iscoroutine(result):
                asyncio.run(result)
            outcome[str(number)] = "ran"
        except Exception:
            outcome[str(number)] = traceback.format_exc()
    return outcome


def main(directory: Path, model: Path) -> None:
    """Run each page in a fork of this process and in a directory of its own."""
    exec("from rollwright import *")  # imported once for all pages; nothing is computed before the forks
    gc.freeze()  # collections of the forks would copy all of it
    for page in PAGES:
        place = directory / page
        place.mkdir()
        child = os.fork()
        if not child:
            os.chdir(place)
            os.symlink(model, "my-model")
            sys.path.insert(0, str(place))
            Path("my_module.py").write_text(PAGES["workflows"][0])
            try:
                outcome = run_page(page)
            except BaseException:
                outcome = {"what comes before": traceback.format_exc()}
            Path("outcome.json").write_text(json.dumps(outcome))
            os._exit(0)  # whatever thread a page left
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
