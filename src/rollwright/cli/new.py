"""``rollwright model new`` and ``rollwright new workflow``: make a model or the files of a new workflow. Nothing is overwritten."""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rollwright.config.experiment import NewModelConfig
from rollwright.config.loading import build_config, dump_yaml
from rollwright.config.source import parse_yaml
from rollwright.errors import ConfigError

models = typer.Typer(no_args_is_help=True)
app = typer.Typer(no_args_is_help=True)


@models.command("new")
def new_model(
    directory: Annotated[str, typer.Argument(help="Directory to write the model to; it must be empty or new.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value]...",
            help="Keys of a model stage, such as `layers=6` or `pieces=['<answer>','</answer>']`.",
            show_default=False,
        ),
    ] = None,
    architecture: Annotated[str | None, typer.Option(help="qwen3, qwen2, llama or qwen2_vl (a vision model).")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None,
    layers: Annotated[int | None, typer.Option(help="Transformer blocks.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    characters: Annotated[str | None, typer.Option(help="Characters of the tokenizer; else printable ASCII.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer directory or name to take over instead.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the weights.")] = None,
) -> None:
    """Write a model with random weights and its tokenizer, in Hugging Face form.

    The same keys make a model stage of a config; `rollwright config schema --class rollwright.config.experiment.NewModelConfig`
    lists them all.
    """
    options: dict[str, Any] = {
        "architecture": architecture,
        "hidden_size": hidden_size,
        "layers": layers,
        "heads": heads,
        "characters": characters,
        "vocabulary_from": tokenizer,
        "seed": seed,
    }
    given = {"path": directory, **{key: value for key, value in options.items() if value is not None}}
    config = build_config(parse_yaml(dump_yaml(given), file="command line"), settings or [], NewModelConfig)
    place = Path(config.path)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(f"{place} exists and is not an empty directory; choose another, nothing is overwritten.")
    from rollwright.trainers.stages import make_model

    make_model(config)


@app.command()
def workflow(
    name: Annotated[str, typer.Argument(help="Name in lower case, such as `two_readers`; files and class are named after it.")],
    directory: Annotated[Path, typer.Option(help="Directory for the files; created if it does not exist.")] = Path("."),
) -> None:
    """Write a workflow, registered under NAME, a config that trains it, and a test that passes.

    The config runs at once, from a model made on the spot: `rollwright run NAME.yaml`.
    """
    _check_name(name, directory)
    class_name = "".join(part.capitalize() for part in name.removesuffix("_workflow").split("_")) + "Workflow"
    files = {f"{name}.py": WORKFLOW, f"{name}.yaml": CONFIG, f"test_{name}.py": TEST}
    if existing := [file for file in files if (directory / file).exists()]:
        raise ConfigError(f"{directory / existing[0]} exists; choose another name or directory, nothing is overwritten.")
    directory.mkdir(parents=True, exist_ok=True)
    for file, template in files.items():
        text = template.replace("<name>", name).replace("<Class>", class_name)
        (directory / file).write_text(text, encoding="utf-8")
    inside = "" if directory == Path(".") else f"cd {directory} && "
    typer.echo(f"{directory / f'{name}.py'}: {class_name}, the code of an episode: begin here")
    first = "" if importlib.util.find_spec("pytest") else "pip install pytest && "
    typer.echo(f"{directory / f'test_{name}.py'}: {inside}{first}python -m pytest test_{name}.py")
    typer.echo(f"{directory / f'{name}.yaml'}: {inside}rollwright run {name}.yaml")


def _check_name(name: str, directory: Path) -> None:
    from rollwright.workflows.registry import WORKFLOWS

    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name.startswith("_"):
        raise ConfigError(
            f"{name!r} is no name for a Python module: use lower case, digits and underscores, as in two_readers."
        )
    if name in WORKFLOWS:
        raise ConfigError(f"a workflow {name!r} is built in; choose another name.")
    found = importlib.util.find_spec(name) if name not in sys.modules else sys.modules[name].__spec__
    # A directory without __init__.py has no origin and hides no module.
    origin = found.origin if found is not None else None
    if origin is not None and Path(origin).parent not in (Path.cwd(), directory.resolve()):
        raise ConfigError(f"a module {name!r} is installed already, which {name}.py would hide; choose another name.")


#: Template of ``rollwright new workflow``; ``<name>`` and ``<Class>`` are replaced.
WORKFLOW = '''"""<Class>: say here, in one sentence, what an episode is."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from rollwright import WORKFLOWS, AsyncRewardWrapper, GenerationHyperparameters, ModelRequest, RolloutWorkflow, get_tracker


@WORKFLOWS.register_module("<name>")
class <Class>(RolloutWorkflow):
    """Asks once and scores the answer. Constructor arguments are the keys of `workflow_kwargs` in the config.

    Args:
        reward_fn: function, registered name or import path; filled in from the config where left out.
        gconfig: how tokens are sampled; filled in.
        tokenizer: the policy's tokenizer; filled in.
        instruction: what the system message says.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        instruction: str = "",
    ) -> None:
        self.reward_fn = AsyncRewardWrapper(reward_fn)  # runs apart, under a time limit
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer = tokenizer
        self.instruction = instruction

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run one episode on the task `data`. Await everything that takes time; all episodes share one event loop."""
        messages = list(data["messages"])
        if self.instruction:
            messages.insert(0, {"role": "system", "content": self.instruction})
        prompt_ids = self.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)

        # Turns of one conversation share one rid. To go on, append response.output_tokens and the ids of what you
        # say next to prompt_ids, and ask again: sampled tokens are never decoded and encoded again.
        request = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=prompt_ids,
            gconfig=self.gconfig.new(n_samples=1),
            tokenizer=self.tokenizer,
        )
        response = await engine.agenerate(request)
        if response.stop_reason == "abort":
            return None  # rejects the sample on purpose; an exception counts as a failure and is tried again

        prompt = self.tokenizer.decode(prompt_ids)
        completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        reward = await self.reward_fn(prompt, completion, prompt_ids, response.output_tokens, **data)
        get_tracker("rollout").scalar(prompt_tokens=response.input_len)
        # Log-probabilities, versions and masks are filled in from the record of what the engine sampled.
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": reward}
'''

CONFIG = """# `rollwright run <name>.yaml`, from the directory of <name>.py.
experiment_name: <name>
trial_name: first
seed: 1

workflow: <name>.<Class>
workflow_kwargs: {instruction: ""}
reward_fn: numeric_reward    # 1 where the last number of the completion is the answer
gconfig: {n_samples: 4, max_new_tokens: 16, temperature: 1.0}

stages:
  # A small model with random weights, to see that everything runs. Put your own at actor.path and take this stage out.
  - name: model
    kind: model
    path: ${run_dir}/model
    hidden_size: 32
    layers: 2
    max_position_embeddings: 256

  - name: grpo
    kind: rl
    actor: {path: "${run_dir}/model", optimizer: {lr: 1.0e-4}}
    train_dataset: {path: arithmetic, split: train, batch_size: 4, kwargs: {digits: 1}}
    valid_dataset: {path: arithmetic, split: valid, kwargs: {digits: 1}}
    evaluator: {every_steps: 2, limit: 4, gconfig: {greedy: true, max_new_tokens: 16}}
    total_train_steps: 2
"""

TEST = '''"""<Class>: what it asks, what it returns, and that it trains."""

import asyncio
from pathlib import Path

from rollwright import GenerationHyperparameters, ModelResponse, build_character_tokenizer, load_stages

from <name> import <Class>

TASK = {"messages": [{"role": "user", "content": "6*7="}], "answer": "42"}


class Says:
    """An engine that says what it is told to."""

    def __init__(self, tokenizer, text):
        self.tokens, self.requests = [*tokenizer.encode(text), tokenizer.eos_token_id], []

    async def agenerate(self, request):
        self.requests.append(request)
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=self.tokens,
            output_logprobs=[-0.5] * len(self.tokens),
            output_versions=[0] * len(self.tokens),
        )


def test_an_episode():
    tokenizer = build_character_tokenizer()
    engine = Says(tokenizer, "42")
    gconfig = GenerationHyperparameters(max_new_tokens=8)
    workflow = <Class>("exact_match_reward", gconfig, tokenizer, instruction="Reckon.")
    row = asyncio.run(workflow.arun_episode(engine, TASK))
    assert "Reckon." in tokenizer.decode(engine.requests[0].input_ids)
    assert row["output_ids"] == engine.tokens
    assert row["reward"] == 1.0


def test_the_config_trains_it(tmp_path):
    from rollwright.trainers.stages import run_config

    file = Path(__file__).with_name("<name>.yaml")
    assert run_config(load_stages(file, [f"cluster.fileroot={tmp_path}", "stats_logger.display=none"])) == 0
    assert list(tmp_path.glob("<name>/first/grpo/checkpoints/final/*.safetensors"))
'''
