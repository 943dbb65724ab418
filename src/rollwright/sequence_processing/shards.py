"""Very large experiments: shard by shard to Parquet or JSONL files, resumable, on one process or several.

Invariants:

* a shard's file appears under its name when it is complete, and is never written again;
* what a shard holds depends on the experiment alone (prompts, seed, config, weights), not on where it was interrupted or how
  many processes worked on it, up to the rounding of batches;
* a directory holds one experiment: ``experiment.json`` says which, and another is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rollwright.atomic import replaced_file, write_json
from rollwright.data.rows import read_rows
from rollwright.errors import CheckpointError, ConfigError
from rollwright.sequence_processing import processes
from rollwright.sequence_processing.batches import BatchedSequences, LogprobResults, experiment_metrics
from rollwright.sequence_processing.generation import check_lengths
from rollwright.sequence_processing.models import unwrapped
from rollwright.sequence_processing.progress import progress_bar
from rollwright.sequence_processing.prompts import Prompt, encoded
from rollwright.tracking.sinks import MetricsLogger, read_metrics
from rollwright.training.parallel import full_tensor, rank, summed, wait_for_all, world_size

if TYPE_CHECKING:
    from rollwright.sequence_processing.processor import SequenceProcessor

MANIFEST, METRICS = "experiment.json", "metrics.jsonl"


@dataclasses.dataclass
class ShardOptions:
    """How an experiment is cut and kept.

    Attributes:
        prompts_per_shard: prompts of a file. Its sequences should be several times ``gen_batch_size``, or the end of each
            shard decodes a small batch.
        file_format: ``parquet`` or ``jsonl``.
        resume: go on with the experiment that the directory holds.
        sinks: where each shard's metrics go besides ``metrics.jsonl``: tensorboard, wandb, trackio.
        project, run_name: at those sinks; the run's name is the directory's unless given.
        gen_batch_size, tf_batch_size: in place of the config's.
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
        directory: where it is.
        files: its shards, in the order of the prompts.
    """

    directory: Path
    files: list[Path]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every response with its prompt, log-probabilities and entropies; one shard in memory at a time."""
        for file in self.files:
            yield from read_rows(file)


def run_experiment(
    processor: SequenceProcessor,
    directory: Path,
    prompts: Sequence[Prompt],
    group: int,
    seed: int | None,
    options: ShardOptions,
) -> ShardedExperiment:
    """Carry out what of the experiment is not on disk yet.

    Raises:
        CheckpointError: the directory holds another experiment, or one that ``resume`` was not given for.
    """
    ids = encoded(prompts, processor.tokenizer)
    check_lengths(ids, unwrapped(processor.model))
    drawn = int(torch.randint(1 << 62, ())) if seed is None else seed
    drawn = processes.agreed_seed(drawn, processor.device)
    wanted = _manifest(processor, ids, group, options)
    seed = _open_directory(directory, wanted, drawn, seed is not None, options.resume, processor.device)
    starts = range(0, len(ids), options.prompts_per_shard)
    files = [directory / f"shard-{number:05d}.{options.file_format}" for number in range(len(starts))]
    mine = [(number, start) for number, start in enumerate(starts) if number % world_size() == rank()]
    todo = [(number, start) for number, start in mine if not files[number].exists()]
    write = {"parquet": _write_parquet, "jsonl": _write_jsonl}[options.file_format]
    bar = progress_bar(len(mine), "shards", processor.progress)
    with _ShardMetrics(directory, options, wanted) as metrics, bar as advance:
        advance(len(mine) - len(todo))
        for number, start in todo:
            part = slice(start, start + options.prompts_per_shard)
            sequences, results = processor.shard(ids[part], group, seed, start, options.gen_batch_size, options.tf_batch_size)
            rows = _rows(processor.tokenizer, prompts[part], sequences, results, start)
            with replaced_file(files[number], durable=True) as draft:
                write(draft, rows)
            metrics({"shard": float(number), **experiment_metrics(sequences, results)})
            advance(1)
    wait_for_all()
    return ShardedExperiment(directory, files)


# ------------------------------------------------------------------ which experiment


def _manifest(processor: SequenceProcessor, ids: list[list[int]], group: int, options: ShardOptions) -> dict[str, Any]:
    """What decides the results; batch sizes do so only by rounding, and are left out."""
    config = dataclasses.asdict(processor.config)
    sizes = ("gen_batch_size", "tf_batch_size", "deterministic")
    return {
        "prompts": len(ids),
        "prompts_digest": _digest(json.dumps(ids).encode()),
        "G": group,
        "prompts_per_shard": options.prompts_per_shard,
        "file_format": options.file_format,
        "generation": {key: value for key, value in config.items() if key not in sizes},
        "weights_digest": _weights_digest(processor.model),
    }


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _weights_digest(model: nn.Module) -> str:
    """A few numbers of every parameter: enough to notice that a model was trained or is another one."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in unwrapped(model).parameters():
        digest.update(full_tensor(parameter.detach()).flatten()[:16].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _open_directory(
    directory: Path, wanted: dict[str, Any], drawn: int, is_given: bool, resume: bool, device: torch.device
) -> int:
    """Make or check the directory on rank 0, and agree on the seed.

    Returns:
        The experiment's seed: ``drawn``, or that of the experiment that is resumed.
    """
    seed, fault = drawn, None
    if rank() == 0:
        try:
            seed = _claim(directory, wanted, drawn, is_given, resume)
        except (CheckpointError, OSError) as error:
            fault = error
    failed = int(summed(torch.tensor(int(fault is not None), device=device)))
    if fault is not None:
        raise fault
    if failed:
        raise CheckpointError(f"Process 0 could not open {directory}: its message says why.")
    return processes.agreed_seed(seed, device)


def _claim(directory: Path, wanted: dict[str, Any], drawn: int, is_given: bool, resume: bool) -> int:
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


class _ShardMetrics:
    """Logs one record for each shard: rank 0 to the sinks too, other ranks to a file of their own."""

    def __init__(self, directory: Path, options: ShardOptions, settings: dict[str, Any]) -> None:
        file = directory / (METRICS if rank() == 0 else f"metrics-rank{rank()}.jsonl")
        self._step = len(read_metrics(file)) if file.exists() else 0
        self._logger = MetricsLogger(
            file,
            options.sinks if rank() == 0 else (),
            project=options.project,
            run_name=options.run_name or directory.name,
            config=settings,
            resume_step=self._step if self._step else None,
        )

    def __call__(self, metrics: dict[str, float]) -> None:
        self._step += 1
        self._logger.log(self._step, metrics)

    def __enter__(self) -> _ShardMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.close()
