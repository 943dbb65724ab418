"""Very large experiments: written shard by shard to Parquet or JSONL files, resumable, on one or several processes.

Invariants:

* a shard's file appears under its name only when it is complete, and is never written again;
* a shard's content depends only on the experiment (prompts, seed, config, weights), not on interruptions or the number of processes,
  except that the batch size may change rounding;
* a directory has one experiment, identified by ``experiment.json``; running another experiment there is an error.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from rollwright.atomic import replaced_file, write_json
from rollwright.data.rows import read_rows
from rollwright.errors import CheckpointError, ConfigError
from rollwright.sequence_processing.batches import BatchedSequences, LogprobResults
from rollwright.sequence_processing.generation import Prompt
from rollwright.sequence_processing.models import unwrapped
from rollwright.tracking.metrics_file import read_metrics
from rollwright.tracking.progress import progress_bar
from rollwright.tracking.sinks import MetricsLogger
from rollwright.training.fsdp import full_tensor
from rollwright.training.parallel import from_first_rank, rank, wait_for_all, world_size

MANIFEST, METRICS = "experiment.json", "metrics.jsonl"


@dataclasses.dataclass
class ShardOptions:
    """Options for dividing and storing an experiment.

    Attributes:
        prompts_per_shard: number of prompts per file. A shard should have several times ``gen_batch_size`` sequences, because the end of
            each shard decodes a small batch.
        file_format: ``parquet`` or ``jsonl``.
        resume: continue the experiment in the directory.
        sinks: destinations of each shard's metrics besides ``metrics.jsonl``: tensorboard, wandb, trackio, mlflow.
        project, run_name: project and run names in these sinks. The default run name is the directory's name.
        gen_batch_size, tf_batch_size: override the batch sizes of the config.
    """

    prompts_per_shard: int = 64
    file_format: Literal["parquet", "jsonl"] = "parquet"
    resume: bool = False
    sinks: Sequence[str] = ()
    project: str = "rollwright"
    run_name: str | None = None
    gen_batch_size: int | Literal["auto"] | None = None
    tf_batch_size: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        if self.prompts_per_shard < 1:
            raise ConfigError(f"prompts_per_shard is {self.prompts_per_shard}: give 1 or more.")
        if self.file_format not in ("parquet", "jsonl"):
            raise ConfigError(f"file_format is {self.file_format!r}: choose parquet or jsonl.")


@dataclasses.dataclass(frozen=True)
class ShardedExperiment:
    """A finished experiment on disk.

    Attributes:
        directory: directory of the experiment.
        files: files of the shards, in the order of the prompts.
    """

    directory: Path
    files: list[Path]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for every response, including its prompt, log-probabilities and entropies, reading one shard at a time."""
        for file in self.files:
            yield from read_rows(file)


def run_experiment(
    directory: Path,
    options: ShardOptions,
    *,
    prompts: Sequence[Prompt],
    ids: list[list[int]],
    group: int,
    seed: int | None,
    generation: dict[str, Any],
    model: nn.Module,
    tokenizer: Any,
    produce: Callable[[slice, int], tuple[BatchedSequences, LogprobResults]],
    show_progress: bool | None = None,
) -> ShardedExperiment:
    """Run the part of an experiment that is not on disk yet.

    Args:
        directory: directory of the files.
        options: how the experiment is divided and stored.
        prompts: the prompts as passed by the caller.
        ids: token ids of each prompt.
        group: number of responses to each prompt.
        seed: seed of the experiment. None draws one for all processes.
        generation: settings of ``GenerationConfig``, recorded in the manifest.
        model: the model, whose weights the manifest identifies.
        tokenizer: decodes prompts that are not strings.
        produce: generates and scores the prompts in a slice with a seed.
        show_progress: whether to show progress bars. None shows them only on a terminal and in a notebook.

    Raises:
        CheckpointError: the directory has other files or another experiment, or has this experiment and ``resume`` is off.
    """
    sizes = ("gen_batch_size", "tf_batch_size", "deterministic")  # settings that change results only by rounding
    manifest = {
        "prompts": len(ids),
        "prompts_digest": hashlib.blake2b(json.dumps(ids).encode(), digest_size=16).hexdigest(),
        "G": group,
        "prompts_per_shard": options.prompts_per_shard,
        "file_format": options.file_format,
        "generation": {key: value for key, value in generation.items() if key not in sizes},
        "weights_digest": _weights_digest(model),
    }
    drawn = int(torch.randint(1 << 62, ())) if seed is None else seed
    agreed_seed = from_first_rank(lambda: _claim(directory, manifest, drawn, seed is not None, options.resume))
    starts = range(0, len(ids), options.prompts_per_shard)
    files = [directory / f"shard-{number:05d}.{options.file_format}" for number in range(len(starts))]
    mine = [(number, start) for number, start in enumerate(starts) if number % world_size() == rank()]
    todo = [(number, start) for number, start in mine if not files[number].exists()]
    write = {"parquet": _write_parquet, "jsonl": _write_jsonl}[options.file_format]
    metrics = directory / (METRICS if rank() == 0 else f"metrics-rank{rank()}.jsonl")  # rank 0 logs to the sinks, too
    steps = len(read_metrics(metrics)) if metrics.exists() else 0
    log = MetricsLogger(
        metrics,
        options.sinks if rank() == 0 else (),
        project=options.project,
        run_name=options.run_name or directory.name,
        config=manifest,
        resume_step=steps or None,
    )
    with contextlib.closing(log), progress_bar(len(mine), "shards", show_progress) as advance:
        advance(len(mine) - len(todo))
        for step, (number, start) in enumerate(todo, steps + 1):
            part = slice(start, start + options.prompts_per_shard)
            sequences, results = produce(part, agreed_seed)
            rows = _rows(tokenizer, prompts[part], sequences, results, start)
            with replaced_file(files[number], durable=True) as draft:
                write(draft, rows)
            tokens = sum(len(row["response_ids"]) for row in rows)
            log.log(step, {"shard": float(number), "generated_tokens": float(tokens), **_means(rows)})
            advance(1)
    wait_for_all()
    return ShardedExperiment(directory, files)


# ------------------------------------------------------------------ which experiment


def _weights_digest(model: nn.Module) -> str:
    """Return a digest of a few numbers of every parameter, which detects a model that was trained further or replaced."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in unwrapped(model).parameters():
        digest.update(full_tensor(parameter.detach()).flatten()[:16].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _claim(directory: Path, wanted: dict[str, Any], drawn: int, is_given: bool, resume: bool) -> int:
    """Create or check the directory, and return the seed: that of the resumed experiment, or else ``drawn``."""
    file = directory / MANIFEST
    if not file.exists():
        if directory.exists() and any(directory.iterdir()):
            raise CheckpointError(f"{directory} is not empty and holds no {MANIFEST}: choose another directory.")
        directory.mkdir(parents=True, exist_ok=True)
        write_json(file, {**wanted, "seed": drawn}, durable=True)
        return drawn
    if not resume:
        raise CheckpointError(f"{directory} holds an experiment: give resume=True to go on with it, or another directory.")
    found = json.loads(file.read_text(encoding="utf-8"))
    if is_given:
        wanted = {**wanted, "seed": drawn}
    if other := [key for key, value in wanted.items() if found.get(key) != value]:
        raise CheckpointError(
            f"{file} is of another experiment: it differs in {', '.join(other)}. Resume with what it was started with, or "
            "choose another directory."
        )
    return int(found["seed"])


# ------------------------------------------------------------------ rows and files


def _rows(
    tokenizer: Any, prompts: Sequence[Prompt], sequences: BatchedSequences, results: LogprobResults, first: int
) -> list[dict[str, Any]]:
    rows = []
    for b, prompt in enumerate(prompts):
        prompt_ids = sequences.prompt(b).tolist()
        for g, text in enumerate(sequences.responses_text[b]):
            rows.append(
                {
                    "prompt_index": first + b,
                    "response_index": g,
                    "prompt": prompt if isinstance(prompt, str) else tokenizer.decode(prompt_ids),
                    "response": text,
                    "prompt_ids": prompt_ids,
                    "response_ids": sequences.response(b, g).tolist(),
                    "logprobs": results.logprobs[b][g].tolist(),
                    "entropies": results.entropies[b][g].tolist(),
                    "sequence_logprob": results.sequence_logprobs[b][g],
                    "stop_reason": sequences.stop_reasons[b][g],
                }
            )
    return rows


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    integers, floats = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.float32())
    types = {"prompt_ids": integers, "response_ids": integers, "logprobs": floats, "entropies": floats}
    types |= {"prompt_index": pyarrow.int64(), "response_index": pyarrow.int32(), "sequence_logprob": pyarrow.float64()}
    schema = pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in rows[0]])
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Compute means over responses and over their tokens."""
    lengths = np.array([len(row["response_ids"]) for row in rows], dtype=float)
    totals = np.array([row["sequence_logprob"] for row in rows])
    entropies = np.array([float(np.sum(row["entropies"])) for row in rows])
    tokens = max(1.0, float(lengths.sum()))
    return {
        "responses": len(rows),
        "length": float(lengths.mean()),
        "truncated": sum(row["stop_reason"] == "length" for row in rows) / len(rows),
        "entropy": float(entropies.sum()) / tokens,
        "entropy_variance": float(np.var(entropies / np.maximum(lengths, 1.0))),
        "token_logprob": float(totals.sum()) / tokens,
        "sequence_logprob": float(totals.mean()),
    }


def prompt_table(experiment: ShardedExperiment) -> list[dict[str, Any]]:
    """Compute means over each prompt's responses.

    Returns:
        One row per prompt: the prompt's index and text, the number of responses, their mean length in tokens, the share of responses
        that a limit cut, the mean of the token entropies, the variance of the responses' mean entropies, and the mean log-probability of
        a token and of a response, in nats.
    """
    rows = []
    for index, group in itertools.groupby(experiment.rows(), key=lambda row: row["prompt_index"]):
        responses = list(group)
        rows.append({"index": index, "prompt": responses[0]["prompt"], **_means(responses)})
    return rows


def write_prompt_table(rows: list[dict[str, Any]], path: Path) -> Path:
    """Write the result of ``prompt_table`` as CSV and return the path."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
