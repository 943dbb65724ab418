"""``rollwright sequences``: generate and score responses, and write them as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollwright.errors import ConfigError

if TYPE_CHECKING:
    from rollwright.sequence_processing.shards import ShardedExperiment


def sequences(
    model: Annotated[str, typer.Argument(metavar="DIR", help="Model or LoRA adapter: a directory or Hugging Face name.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory of the results; new, or with --resume.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Registered dataset, file, directory, or owner/name at Hugging Face.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    dataset_path: Annotated[
        str | None, typer.Option(help="Path that is passed to a registered dataset.", show_default=False)
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts drawn from the dataset; default: all.")] = None,
    responses: Annotated[int, typer.Option("--responses", "-G", min=1, help="Responses to each prompt.")] = 8,
    temperature: Annotated[float, typer.Option(min=0.0, help="Softmax temperature; 0: greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus probability.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a response.")] = 200,
    stop_after_answer: Annotated[bool, typer.Option(help="End a response after `</answer>`.")] = True,
    seed: Annotated[int | None, typer.Option(help="Seed of the draw and of the sampling.")] = None,
    deterministic: Annotated[bool, typer.Option(help="Keep batch sizes fixed.")] = False,
    gen_batch_size: Annotated[str, typer.Option(help="Sequences decoded at once; a number, or auto.")] = "auto",
    tf_batch_size: Annotated[str, typer.Option(help="Sequences scored at once; a number, or auto.")] = "auto",
    prompts_per_shard: Annotated[int, typer.Option(min=1, help="Prompts of a file.")] = 64,
    file_format: Annotated[str, typer.Option("--format", help="parquet or jsonl.")] = "parquet",
    resume: Annotated[bool, typer.Option(help="Continue the experiment in the directory.")] = False,
    sink: Annotated[list[str] | None, typer.Option(help="tensorboard, wandb, trackio or mlflow; may be repeated.")] = None,
    project: Annotated[str, typer.Option(help="Project at the sinks.")] = "rollwright",
    device: Annotated[str, typer.Option(help="auto uses a GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
) -> None:
    """Generate responses to prompts, score them, and write the table of them.

    `DIR/shard-*.parquet` hold one row for each response: text, ids, log-probabilities, entropies. `DIR/prompts.csv` holds one
    row for each prompt. Under `torchrun -m rollwright sequences …` the shards are dealt out to the processes.
    """
    import torch.distributed as dist

    from rollwright.sequence_processing import GenerationConfig, SequenceProcessor
    from rollwright.training.parallel import rank

    config = GenerationConfig(
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        gen_batch_size=_batch_size(gen_batch_size, 32 if deterministic else "auto"),
        tf_batch_size=_batch_size(tf_batch_size, 64 if deterministic else "auto"),
        stop_after_answer=stop_after_answer,
        deterministic=deterministic,
    )
    loaded, tokenizer = _load(model, device, dtype, trust_remote_code)
    experiment = SequenceProcessor(loaded, tokenizer, config).generate_to_shards(
        output,
        prompt or None,
        responses,
        dataset,
        split,
        prompts,
        seed,
        dataset_kwargs={"path": dataset_path} if dataset_path else None,
        prompts_per_shard=prompts_per_shard,
        file_format=file_format,
        resume=resume,
        sinks=sink or (),
        project=project,
    )
    if rank() == 0:
        _report(experiment)
    if dist.is_initialized():
        dist.destroy_process_group()


def _batch_size(text: str, automatic: Any) -> Any:
    if text == "auto":
        return automatic
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"a batch size is {text!r}: give a number from 1 on, or auto.")
    return int(text)


def _load(path: str, device: str, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load the model, with its adapter if ``path`` is one, and the tokenizer."""
    from rollwright.config.sections import TrainEngineConfig
    from rollwright.data.tokenizer import load_tokenizer
    from rollwright.training.model import load_model, resolve_device
    from rollwright.training.parallel import join_processes

    place = join_processes(resolve_device(device))
    base, adapter_file = path, Path(path) / "adapter_config.json"
    is_adapter = adapter_file.is_file()
    if is_adapter:
        base = json.loads(adapter_file.read_text(encoding="utf-8")).get("base_model_name_or_path")
        if not base:
            raise ConfigError(f"{path}/adapter_config.json names no base_model_name_or_path: write the base model's there.")
    config = TrainEngineConfig(path=base, dtype=dtype, optimizer=None, trust_remote_code=trust_remote_code)
    model = load_model(config, device=place)
    has_tokenizer = is_adapter and (Path(path) / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(path if has_tokenizer else base, trust_remote_code)
    if is_adapter:
        try:
            from peft import PeftModel
        except ModuleNotFoundError:
            raise ConfigError(f"{path} is an adapter, and peft is not installed: pip install 'rollwright[lora]'.") from None
        model = PeftModel.from_pretrained(model, path).eval()
    return model, tokenizer


def _report(experiment: ShardedExperiment) -> None:
    """Write a row for each prompt to prompts.csv, and print the first rows."""
    from rich.table import Column, Table

    from rollwright.sequence_processing.shards import prompt_table, write_prompt_table
    from rollwright.tracking.logging import console

    rows = prompt_table(experiment)
    file = write_prompt_table(rows, experiment.directory / "prompts.csv")
    shown = ("responses", "length", "truncated", "entropy", "sequence_logprob")
    columns = [Column("prompt", min_width=16), *(Column(name.replace("_", " "), justify="right") for name in shown)]
    table = Table(*columns, title=f"{experiment.directory}: {len(rows)} prompts")
    for row in rows[:20]:
        table.add_row(*(_cell(row[name]) for name in ("prompt", *shown)))
    console().print(table)
    console().print(f"responses: {experiment.directory}/shard-*; prompts: {file}", soft_wrap=True)


def _cell(value: Any) -> str:
    from rich.markup import escape

    if isinstance(value, float):
        return f"{value:.3f}"
    text = " ".join(str(value).split())
    return escape(text if len(text) <= 60 else text[:57] + "…")
