"""The search agent's notebook, and the notebook that it follows, executed from top to bottom on a CPU."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from quiet_ports import quiet_ports
from worlds.encyclopedia import questions, tool, vocabulary, write_corpus

from rollwright.config.sections import RolloutConfig
from rollwright.data.tokenizer import build_word_tokenizer
from rollwright.errors import RolloutError

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = next(iter((ROOT.parent / "shared" / "seeds").glob("001_*")), None)
needs_reference = pytest.mark.skipif(REFERENCE is None, reason="needs ../shared/seeds/001*")
DOUBLED_LINE = "            input_ids += resp.output_tokens\n"


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """A model with random weights whose tokens are the encyclopedia's; it often ends by itself."""
    from rollwright.training.model import new_model

    path = tmp_path_factory.mktemp("random") / "model"
    tokenizer = build_word_tokenizer(vocabulary())
    new_model(
        path, tokenizer=tokenizer, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=8192
    )
    return path


def reference_cells():
    """The code cells of the reference notebook, with its import lines changed by the rule."""
    cells = json.loads(REFERENCE.read_text())["cells"]
    sources = {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}
    return {name: re.sub(r"from areal[\w.]* import", "from rollwright import", source) for name, source in sources.items()}


def execute(notebook, folder, environment):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    variables = {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "datasets"), "HF_HUB_OFFLINE": "1", **environment}
    # The kernel's streams have no file number under pytest's mark, and the reference hands them to its server.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    client.execute(env={**inherited, **variables})
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text", "") for output in outputs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_our_notebook_runs_from_top_to_bottom_and_ends_with_new_weights(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    for part in ("search-agent", "worlds"):
        shutil.copytree(ROOT / "examples" / part, tmp_path / "examples" / part)
    notebook = nbformat.read(ROOT / "examples" / "search_agent.ipynb", as_version=4)
    text = execute(notebook, tmp_path, {"SEARCH_AGENT_DIR": str(tmp_path / "work")})
    told = re.search(r"before training: mean reward ([\d.]+); in (\d+)% of the groups one episode is better", text)
    assert 0.02 <= float(told[1]) <= 0.5, "the notebook says that it gets most names wrong, and knows the form"
    assert int(told[2]) >= 10
    for step in range(1, 6):
        assert f"step {step}: reward" in text
        assert f"tokens sampled by version [{step - 1}]" in text
    changed, of = map(int, re.search(r"(\d+) of (\d+) weights changed; the server is at version 5", text).groups())
    assert changed == of
    assert float(re.search(r"differ by at most ([\d.e-]+)", text)[1]) < 1e-3


@pytest.mark.slow
@needs_reference
@pytest.mark.timeout(900)
def test_the_reference_notebook_runs_but_for_imports_ports_and_its_doubled_line(tmp_path, random_model):
    nbformat = pytest.importorskip("nbformat")
    server_port, master_port, search_port = quiet_ports(3)
    ports = {"SGLANG_PORT, MASTER_PORT = 11451, 14514": f"SGLANG_PORT, MASTER_PORT = {server_port}, {master_port}",
             "localhost:5001": f"localhost:{search_port}"}  # fmt: skip
    notebook = nbformat.v4.new_notebook()
    for source in reference_cells().values():
        source = source.replace(DOUBLED_LINE * 2, DOUBLED_LINE)
        for old, new in ports.items():
            source = source.replace(old, new)
        notebook.cells.append(nbformat.v4.new_code_cell(source))
    notebook.cells.append(
        nbformat.v4.new_code_cell("print('VERSION', rollout.get_version(), len(times)); sglang_process.terminate()")
    )

    write_corpus(tmp_path / "corpus.jsonl", worlds=1, world_size=50)
    with (tmp_path / "tasks.jsonl").open("w") as file:
        for task in questions(size=64, worlds=1, world_size=50):
            file.write(json.dumps({key: task[key] for key in ("question", "answer")}) + "\n")
    shutil.copytree(ROOT / "examples" / "search-agent", tmp_path / "examples" / "search-agent")
    command = [
        sys.executable,
        "-m",
        "rollwright",
        "retrieve",
        "--corpus",
        tmp_path / "corpus.jsonl",
        "--port",
        str(search_port),
    ]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert "Serving" in service.stdout.readline()
        variables = {"SEARCH_AGENT_MODEL": str(random_model), "SEARCH_AGENT_TASKS": str(tmp_path / "tasks.jsonl")}
        text = execute(notebook, tmp_path, variables)
    finally:
        service.terminate()
        service.wait(120)
    assert "VERSION 5 4" in text
    assert ">>> Trajectory 3 >>>" in text
    assert "[LOGGING] turns=" in text


def reference_workflows(tokenizer, doubled):
    """The reference notebook's two workflow classes, over a search tool in this process."""
    cells = reference_cells()
    search = tool(worlds=1, world_size=50)

    async def call_search_tool(queries, topk, return_scores):
        return [await search.search(query, topk) for query in queries]

    names = {"call_search_tool": call_search_tool, "tokenizer": tokenizer}
    template = re.search(r'PROMPT_TEMPLATE = """.*?"""', cells["18"], re.DOTALL)[0]
    imports = (
        "import asyncio, re, uuid\nimport torch\nfrom rollwright import InferenceEngine, ModelRequest, concat_padded_tensors\n"
    )
    workflow = cells["33"] if doubled else cells["33"].replace(DOUBLED_LINE * 2, DOUBLED_LINE)
    for source in (imports, template, cells["23"], cells["27"], cells["31"], workflow, cells["37"]):
        exec(compile(source, "reference", "exec"), names)
    return names["GroupedSearchAgentWorkflow"]


def grouped_reference(random_model, doubled):
    from rollwright import GenerationHyperparameters, LocalRolloutEngine, load_tokenizer

    tokenizer = load_tokenizer(random_model)
    gconfig = GenerationHyperparameters(max_new_tokens=64, stop=["</answer>", "</search>"])
    workflow = reference_workflows(tokenizer, doubled)(gconfig, tokenizer, 2000, 3, 3, False)
    engine = LocalRolloutEngine(RolloutConfig(path=str(random_model), max_sample_retries=0, device="cpu"))
    rows = questions(size=2, worlds=1, world_size=50)
    engine.initialize()
    try:
        return engine.rollout_batch(rows, workflow=workflow)
    finally:
        engine.destroy()


@needs_reference
def test_the_reference_workflows_make_whole_trajectories(random_model):
    batch = grouped_reference(random_model, doubled=False)
    assert batch["input_ids"].shape[0] == 6
    assert batch["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    mask = batch["loss_mask"].bool()
    assert (batch["versions"][mask] == 0).all()  # filled in from the record: the workflow returns none


@needs_reference
def test_with_its_doubled_line_in_the_checker_says_so(random_model):
    with pytest.raises(RolloutError) as error:
        grouped_reference(random_model, doubled=True)
    message = str(error.value)
    assert "GroupedSearchAgentWorkflow" in message
    assert "input_ids" in message
    assert re.search(r"(logprobs|loss_mask|attention_mask)", message)


def test_the_notebooks_config_loads_and_names_the_server(monkeypatch):
    from rollwright import GRPOConfig, SGLangConfig, load_expr_config

    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("SEARCH_AGENT_MODEL", raising=False)
    config, _ = load_expr_config(["--config", "examples/search-agent/local_1.5b_example.yaml"], GRPOConfig)
    assert config.tokenizer_path == config.actor.path == config.sglang.model_path == "Qwen/Qwen2.5-1.5B"
    assert "serve-model" in SGLangConfig.build_cmd(config.sglang, tp_size=1, base_gpu_id=1, host="127.0.0.1", port=1)
    config.sglang.implementation = "sglang"
    assert "sglang.launch_server" in SGLangConfig.build_cmd(config.sglang, tp_size=1, base_gpu_id=1, host="127.0.0.1", port=1)
