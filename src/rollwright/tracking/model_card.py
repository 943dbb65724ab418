"""The model card of a checkpoint: base model, data, algorithm, results and versions, as recorded in its run directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rollwright.atomic import write_text
from rollwright.errors import CheckpointError
from rollwright.tracking.metrics_file import read_metrics
from rollwright.tracking.software import versions

_PACKAGES = ("rollwright", "torch", "transformers")


def write_model_card(checkpoint: Path, step: int) -> Path:
    """Write ``README.md`` into a checkpoint in Hugging Face form.

    Args:
        checkpoint: a directory in the ``checkpoints/`` of a stage. The stage's ``config.yaml`` and ``metrics.jsonl`` are read.
        step: training step of the weights.

    Returns:
        Path of the file.

    Raises:
        CheckpointError: the stage's directory has no ``config.yaml``.
    """
    stage = checkpoint.parents[1]
    try:
        config = yaml.safe_load((stage / "config.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} lies in no stage of a run: {stage / 'config.yaml'} is missing.") from None
    metrics = read_metrics(stage / "metrics.jsonl") if (stage / "metrics.jsonl").exists() else []
    card = _card(config, [record for record in metrics if record["step"] <= step], step)
    write_text(checkpoint / "README.md", card)
    return checkpoint / "README.md"


def _card(config: Mapping[str, Any], metrics: list[dict[str, Any]], step: int) -> str:
    from huggingface_hub import ModelCardData

    trained = config.get("actor") or config["model"]
    algorithm = trained.get("recipe") or ("dpo" if "beta" in config else "sft")
    tags = ["rollwright", algorithm] + (["reinforcement-learning"] if "actor" in config else [])
    # A local directory is not a name on the Hub
    base = None if Path(trained["path"]).is_absolute() or trained["path"].count("/") != 1 else trained["path"]
    is_adapter = trained.get("lora") is not None
    library = "peft" if is_adapter else "transformers"
    data = ModelCardData(library_name=library, base_model=base, tags=[*tags, "lora"] if is_adapter else tags)
    name = f"{config['experiment_name']}/{config['trial_name']}"
    rows = "\n".join(f"| {what} | {value} |" for what, value in _facts(config, trained, algorithm, metrics, step))
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {name}\n\nTrained with Rollwright.\n\n| | |\n|---|---|\n{rows}\n\n"
        f"```python\n{_USE_OF_ADAPTER if is_adapter else _USE}```\n"
    )


_USE = """from transformers import AutoModelForCausalLM, AutoTokenizer

path = "."  # this directory
model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
"""
_USE_OF_ADAPTER = """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

path = "."  # this directory; adapter_config.json names the base model
model, tokenizer = AutoPeftModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
"""


def _facts(
    config: Mapping[str, Any], trained: Mapping[str, Any], algorithm: str, metrics: list[dict[str, Any]], step: int
) -> Iterator[tuple[str, str]]:
    yield "base model", "random weights" if trained["init_from_scratch"] else f"`{trained['path']}`"
    for taskset in config.get("tasksets") or [config["train_dataset"]]:
        parts = [f"`{taskset['path']}`", taskset["subset"], taskset["split"]]
        yield "trained on", ", ".join(str(part) for part in parts if part)
        workflow = taskset["workflow"] or config.get("workflow")
        reward = taskset["reward_fn"] or config.get("reward_fn")
        if "actor" in config:
            yield "episodes", f"`{workflow}`" + (f", scored by `{reward}`" if reward else "")
    yield "algorithm", algorithm
    if (lora := trained.get("lora")) is not None:
        layers = ", ".join(lora["targets"]) or "all linear layers except the output head"
        kind = "DoRA" if lora["use_dora"] else "LoRA"
        yield "trained weights", f"a {kind} adapter of rank {lora['rank']}, alpha {lora['alpha']:g}, on {layers}"
    optimizer = trained["optimizer"]
    yield "optimizer", f"learning rate {optimizer['lr']:g} ({optimizer['lr_scheduler_type']})"
    batch = f"{config['train_dataset']['batch_size']} tasks"
    samples = config.get("gconfig", {}).get("n_samples")
    yield "steps", f"{step} of {batch}" + (f", {samples} samples each" if "actor" in config and samples else "")
    for title, metric in (("reward on held-out tasks", "eval/reward"), ("reward in training", "reward"), ("loss", "loss")):
        values = [(record["step"], record[metric]) for record in metrics if record.get(metric) is not None]
        if values:
            (first_step, first), (last_step, last) = values[0], values[-1]
            yield title, f"{last:.3f} at step {last_step}" + (f" ({first:.3f} at step {first_step})" if len(values) > 1 else "")
    yield "made with", ", ".join(f"{package} {version}" for package, version in versions(_PACKAGES).items())
