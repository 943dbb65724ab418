"""Every name that users import from ``rollwright``: it is there, and importing the package loads nothing heavy."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rollwright

#: The names that the texts this project follows import, by the text.
NAMES_OF_THE_TEXTS = {
    "parallel generation": ["GenerationHyperparameters", "InferenceEngine", "ParallelGenerationWorkflow"],
    "search agent": [
        "AllocationMode",
        "FSDPPPOActor",
        "FinetuneSpec",
        "GRPOConfig",
        "GenerationHyperparameters",
        "InferenceEngine",
        "ModelRequest",
        "RemoteSGLangEngine",
        "SGLangConfig",
        "WeightUpdateMeta",
        "concat_padded_tensors",
        "find_free_ports",
        "load_expr_config",
        "tensor_container_to",
    ],
    "add a workflow": [
        "AsyncRewardWrapper",
        "GenerationHyperparameters",
        "InferenceEngine",
        "ModelRequest",
        "ModelResponse",
        "MultiTurnWorkflow",
        "RLVRWorkflow",
        "RolloutWorkflow",
        "VisionRLVRWorkflow",
        "concat_padded_tensors",
        "logging",
    ],
    "tasks and experiences": [
        "AgentScopeReactMathWorkflow",
        "Experience",
        "FormatConfig",
        "GenerationConfig",
        "MathWorkflow",
        "ModelWrapper",
        "Task",
        "WORKFLOWS",
        "WebShopWorkflow",
        "Workflow",
    ],
    "sequence processing": [
        "BatchedSequences",
        "DATASET_REGISTRY",
        "Example",
        "GenerationConfig",
        "LogprobResults",
        "SequenceProcessor",
    ],
}

#: Import statements of the texts, and the module whose whole path becomes ``rollwright``.
IMPORT = re.compile(
    r"^\s*\"?\s*from ((?:areal|trinity|sequence_processing|rlp_datasets)[\w.]*) import (\([^)]*\)|[^\n\"\\(]+)", re.MULTILINE
)


@pytest.mark.parametrize("name", sorted({*rollwright.__all__, *(n for names in NAMES_OF_THE_TEXTS.values() for n in names)}))
def test_the_name_is_importable(name):
    assert getattr(rollwright, name) is not None
    assert name in dir(rollwright)


def test_the_list_above_is_what_the_texts_import():
    seeds = Path(__file__).parents[2].parent / "shared" / "seeds"
    if not seeds.is_dir():
        pytest.skip("the texts are not beside the repository")
    known = {name for names in NAMES_OF_THE_TEXTS.values() for name in names}
    places = {"MyWorkflow", "ExampleWorkflow"}  # the user's own, in examples
    found = set()
    for file in seeds.glob("*.txt"):
        text = re.sub(r"\\n\",?\n\s*\"", "\n", file.read_text(encoding="utf-8"))
        for _, names in IMPORT.findall(text):
            found.update(re.findall(r"\w+", names))
    assert len(found) > 20
    assert found - places <= known


def test_type_checkers_read_the_names_from_the_table_that_resolves_them():
    stub = Path(rollwright.__file__).with_suffix(".pyi")
    nodes = ast.parse(stub.read_text()).body
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names = {(node.names[0].name, node.names[0].asname) for node in imports}
    second = {node.targets[0].id: node.value.id for node in nodes if isinstance(node, ast.Assign)}
    assert names == {(name, name) for name in rollwright.__all__ if name not in second}
    assert all(getattr(rollwright, name) is getattr(rollwright, other) for name, other in second.items())
    assert all(len(node.names) == 1 for node in imports)
    assert (stub.parent / "py.typed").is_file()


def test_importing_the_package_is_quick_and_loads_nothing_heavy():
    """Quick because of what it leaves out: of other packages it imports none, and config needs no heavy one."""
    code = (
        "import sys; before = set(sys.modules); import rollwright\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "from rollwright import GRPOConfig, load_expr_config\n"
        "print(*sorted(new), *[m for m in ('torch', 'transformers', 'datasets', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rollwright"]


def test_an_unknown_name_says_so():
    with pytest.raises(AttributeError, match="has no name 'Nope'"):
        _ = rollwright.Nope
