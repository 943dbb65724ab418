"""Runs the stages of a config, one after another, in one run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rollwright.config.experiment import EvalConfig, NewModelConfig, PPOConfig
from rollwright.config.loading import Stage, save_config
from rollwright.config.plan import in_words
from rollwright.config.secrets import copy_without_secrets, secrets_of
from rollwright.errors import CheckpointError, ConfigError, TrainingError
from rollwright.placement import rank_processes
from rollwright.placement.placement import Placement, placement_of_stages
from rollwright.processes.pool import processor_count
from rollwright.processes.supervisor import retry_lost
from rollwright.tracking import logging
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory, RunFinishedError
from rollwright.tracking.summary import in_one_line, print_stage, print_summary, write_summary
from rollwright.trainers.checks.unknown_names import refuse_unknown_names
from rollwright.training import parallel
from rollwright.workflows.registry import WORKFLOWS

logger = getLogger("run")


def run_config(stages: Sequence[Stage], *, source_path: Path | None = None) -> int:
    """Run the stages of one run and write ``summary.json``.

    A finished run is not repeated (a message says so), nor are stages that an earlier, interrupted attempt finished. With
    ``recover.mode: resume``, a stage with more steps (or epochs) than before continues training, and later evaluations are repeated.

    If a Ray cluster loses a rank, the run is closed and reopened in this process, and resumes as if the process had been killed.

    Args:
        stages: stages from ``rollwright.load_stages``.
        source_path: the stages' file, which is copied to the run directory.

    Returns:
        0. The summary is in ``summary.json``:
        ``{"eval": {label: {...}}, "seconds": {stage: s}, "stages": {name: results}, "run_directory": path}``.
    """
    WORKFLOWS.load_plugins()  # rewards and operators of plugins are looked up elsewhere
    refuse_unknown_names(stages)
    placement = placement_of_stages(stages)
    placement.join(rank_processes.training_configs(stages))
    if parallel.rank() > 0:
        rank_processes.follow_stages(stages, _set_threads)
    else:
        retry_lost(
            lambda: _carry_out_stages(stages, placement, source_path),
            lambda: logger.warning("the run goes on from its newest recovery checkpoint and its journal, as after a kill"),
            "ranks were lost {} times without a further step",
            errors=placement.reopens_after,
            progress=lambda: RunDirectory(*_place(stages)).steps_made,
        )
        rank_processes.announce_stage(None)
    parallel.leave_processes()
    return 0


def _carry_out_stages(stages: Sequence[Stage], placement: Placement, source_path: Path | None) -> None:
    """Claim the run directory and run the stages that are not finished.

    Raises:
        TrainingError: a rank was lost after training began with ``recover.mode: off``.
    """
    try:
        directory = _claimed(stages)
    except RunFinishedError as finished:
        logging.console().print(f"nothing to do: {finished}", markup=False, highlight=False, soft_wrap=True)
        return
    if source_path is not None:
        secrets = {secret for stage in stages for secret in secrets_of(stage.config)}
        copy_without_secrets(source_path, directory.path / "source.yaml", secrets)
    with directory, directory.explaining_failures():
        done = directory.finished_stages() if directory.resumed else {}
        done = _still_done(stages, done, directory)
        for number, stage in enumerate(stages, 1):
            if stage.name in done:
                logger.info("stage %s was finished before; going on", stage.name)
                continue
            title = f"{number}/{len(stages)} {stage.name}" if len(stages) > 1 else None
            print_stage(title, in_words(stage).replace(f"{directory.path}/", ""))
            _set_threads(stage.config)
            if stage.kind in rank_processes.TRAINS:
                rank_processes.announce_stage(stage.name)
            started = time.monotonic()
            part = directory if len(stages) == 1 else directory.stage(stage.name)
            if _has_page(stage):  # written now, so that a stage that fails at once is in the list of runs
                save_config(stage.config, part.path / "config.yaml")
            try:
                results = _CARRY_OUT[stage.kind](stage, part)
            except placement.reopens_after as error:
                if stage.config.recover.mode == "off" and (done or part.has_metrics):
                    raise TrainingError(f"{error}; with recover.mode off there is no checkpoint to go on from.") from error
                raise
            results["total_seconds"] = time.monotonic() - started
            done[stage.name] = {"kind": stage.kind, "length": _length(stage.config), **results}
            directory.write_stages(done)
        summary = _summarise(done, directory)
        write_summary(directory.summary_file, summary)
        directory.finish()
    print_summary(summary, directory)


def _has_page(stage: Stage) -> bool:
    """Return True if the viewer shows a stage itself; a benchmark has a page for each checkpoint."""
    return stage.kind != "model" and getattr(stage.config, "mode", "both") != "bench"


def _still_done(stages: Sequence[Stage], done: dict[str, Any], directory: RunDirectory) -> dict[str, Any]:
    """Return the results of finished stages, except stages that train further and the evaluations after them.

    Raises:
        CheckpointError: a stage that should train further has no recovery checkpoint.
    """
    kept: dict[str, Any] = {}
    longer = ""
    for stage in [stage for stage in stages if stage.name in done]:
        if _is_longer(stage, done[stage.name]):
            place = directory.path if len(stages) == 1 else directory.path / stage.name
            if not any(place.glob("recover/[!.]*")):
                raise CheckpointError(
                    f"stage {stage.name} is asked to train on after step {done[stage.name]['steps']}, but it left no recovery checkpoint "
                    "(recover.mode was off): set another trial_name."
                )
            longer = stage.name
        elif not (longer and stage.kind == "eval"):
            kept[stage.name] = done[stage.name]
            if longer:
                logger.warning("stage %s began from what %s had made before, and is not repeated", stage.name, longer)
    if len(kept) == len(stages):
        logger.warning(
            "every stage was finished before, and none is asked for more: give total_train_steps (in a file of several stages as "
            "stages.NAME.total_train_steps) to train on"
        )
    if longer:  # so that an interrupted run resumes there
        directory.write_stages(kept)
    return kept


def _length(config: Any) -> list[int | None]:
    """Return the configured length of a stage: its steps and epochs, each None if not set."""
    return [getattr(config, "total_train_steps", None), getattr(config, "total_train_epochs", None)]


def _is_longer(stage: Stage, before: dict[str, Any]) -> bool:
    """Return True if the config asks a finished stage to train further."""
    (steps, epochs), earlier = _length(stage.config), before.get("length")
    if epochs is None or stage.config.recover.mode != "resume" or earlier == [steps, epochs]:
        return False
    return steps > before["steps"] if steps else earlier is not None and epochs > earlier[1]


def _claimed(stages: Sequence[Stage]) -> RunDirectory:
    parts = [stage for stage in stages if getattr(stage.config, "mode", "both") != "both"]
    if parts and len(stages) > 1:
        raise ConfigError(
            f"stage {parts[0].name} is in mode {parts[0].config.mode}, which is one process of a run of several and has no other "
            "stages: give it a file of its own, and carry the other stages out before."
        )
    if parts:
        from rollwright.trainers.modes.shared_run import claim_part

        return claim_part(parts[0].config)
    directory = RunDirectory(*_place(stages))
    mode = next((stage.config.recover.mode for stage in stages if hasattr(stage.config, "recover")), "off")
    return directory.claim({"stages": [stage.to_dict() for stage in stages]}, mode)


def _place(stages: Sequence[Stage]) -> tuple[str, str, str]:
    configs = [stage.config for stage in stages if hasattr(stage.config, "experiment_name")]
    if not configs:
        raise ConfigError(
            "no stage has an experiment_name, so there is nowhere to write; a run of 'model' stages alone is `rollwright model new`."
        )
    places = {(config.cluster.fileroot, config.experiment_name, config.trial_name) for config in configs}
    if len(places) > 1:
        raise ConfigError(
            f"the stages of a run share one run directory, but they name {len(places)}; set names at the top level."
        )
    return places.pop()


def _set_threads(config: Any) -> None:
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if (threads := getattr(getattr(config, "cluster", None), "threads", None)) is not None:
        torch.set_num_threads(threads)
    elif processes > 1 and "OMP_NUM_THREADS" not in os.environ:  # otherwise every process would use all cores
        torch.set_num_threads(max(1, processor_count() // processes))
    if getattr(config, "deterministic", False):
        torch.use_deterministic_algorithms(True, warn_only=True)


# -- kinds of stages ---------------------------------------------------------------------------------------------------


def make_model(config: NewModelConfig) -> dict[str, Any]:
    """Write a model with random weights, and its tokenizer. Returns the model's ``path`` and number of ``parameters``."""
    from rollwright.data.vision import VISION_PIECES
    from rollwright.training.model import new_model, new_vision_model, parameter_count

    sees = config.architecture == "qwen2_vl"
    tokenizer = _make_tokenizer(config, VISION_PIECES if sees else ())
    sizes: dict[str, Any] = {
        "tokenizer": tokenizer,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_embeddings,
        "seed": config.seed,
    }
    if sees:
        model = new_vision_model(config.path, vision=config.vision, **sizes)
    else:
        model = new_model(config.path, config.architecture, head_dim=config.head_dim, **sizes)
    count = parameter_count(model)
    logging.console().print(f"{count / 1e6:.2f} M parameters, {len(tokenizer)} tokens")
    return {"path": config.path, "parameters": count}


def _make_tokenizer(config: NewModelConfig, more: Sequence[str]) -> Any:
    """Copy, train or build the tokenizer of a new model, with ``more`` pieces.

    Raises:
        ConfigError: the config says two ways.
        DataError: the dataset of a BPE tokenizer has no messages.
    """
    from rollwright.data.datasets import get_dataset
    from rollwright.data.tokenizer import ASCII, build_bpe_tokenizer, build_character_tokenizer, load_tokenizer

    own, characters, bpe = config.vocabulary_from, config.characters, config.bpe
    if bpe is not None and (own or characters):
        raise ConfigError("a model's tokenizer is trained (bpe), copied (vocabulary_from) or made of characters: set one.")
    pieces = [*config.pieces, *more]
    if bpe is not None:
        messages = [message for row in get_dataset(bpe.dataset) for message in _conversation(row)]
        texts = (message["content"] for message in messages if isinstance(message.get("content"), str))
        return build_bpe_tokenizer(texts, bpe.tokens, pieces=pieces)
    return load_tokenizer(own) if own else build_character_tokenizer(characters or ASCII, pieces=pieces)


def _conversation(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row's prompt and of its worked completion, if any."""
    completion = row.get("completion") or []
    return [*row.get("messages", ()), *([{"content": completion}] if isinstance(completion, str) else completion)]


def _train_supervised(stage: Stage, directory: RunDirectory) -> dict[str, Any]:
    from rollwright.data.datasets import get_dataset
    from rollwright.trainers import drawn_tasks
    from rollwright.trainers.loops.supervised import DPOTrainer, SFTTrainer

    config = stage.config
    tokenizer = config.tokenizer_path or config.model.path  # counts the tokens of prompts if max_length is set
    thinking = drawn_tasks.thinks(config.workflow_kwargs)
    thinking = config.train_dataset.columns.enable_thinking if thinking is None else thinking
    valid = get_dataset(config.valid_dataset, tokenizer, thinking) if config.valid_dataset else None
    trainer_class = {"sft": SFTTrainer, "dpo": DPOTrainer}[stage.kind]
    with trainer_class(config, get_dataset(config.train_dataset, tokenizer), valid, directory=directory) as trainer:
        return trainer.train()


def _train_policy(config: PPOConfig, directory: RunDirectory) -> dict[str, Any]:
    from rollwright.trainers import drawn_tasks
    from rollwright.trainers.loops.rl import PPOTrainer

    tasks = drawn_tasks.task_source(config)
    with PPOTrainer(config, tasks, drawn_tasks.evaluation_rows(config), directory=directory) as trainer:
        return trainer.train()


def _explore(config: PPOConfig, directory: RunDirectory) -> dict[str, Any]:
    from rollwright.trainers.modes.explore import Explorer

    with Explorer(config, directory) as explorer:
        return explorer.explore()


def _train_from_store(config: PPOConfig, directory: RunDirectory) -> dict[str, Any]:
    from rollwright.trainers.modes.train_from_store import StoreTrainer

    with StoreTrainer(config, directory) as trainer:
        return trainer.train()


def _bench(config: PPOConfig, directory: RunDirectory) -> dict[str, Any]:
    from rollwright.trainers.modes.bench import bench

    return bench(config, directory)


def _serve(config: PPOConfig, directory: RunDirectory) -> dict[str, Any]:
    try:
        from rollwright.trainers.modes.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"mode serve needs the package {error.name}, which is not installed: pip install 'rollwright[openai,store]'."
        ) from error
    return serve(config, directory)


#: Functions that run an ``rl`` stage, by its mode.
_PLAY = {"both": _train_policy, "explore": _explore, "train": _train_from_store, "bench": _bench, "serve": _serve}


def _evaluate(stage: Stage, directory: RunDirectory) -> dict[str, Any]:
    from rollwright.trainers.loops.evaluation import evaluate_model

    config: EvalConfig = stage.config
    scores = evaluate_model(config, directory)
    logging.console().print(f"{in_one_line(scores)} over {scores['tasks']} tasks", highlight=False, markup=False)
    return {"label": config.label or stage.name, **scores}


_CARRY_OUT = {
    "model": lambda stage, directory: make_model(stage.config),
    "sft": _train_supervised,
    "dpo": _train_supervised,
    "rl": lambda stage, directory: _PLAY[stage.config.mode](stage.config, directory),
    "eval": _evaluate,
}


def _summarise(done: dict[str, Any], directory: RunDirectory) -> dict[str, Any]:
    evaluations = {result["label"]: result for result in done.values() if result["kind"] == "eval"}
    return {
        "run_directory": str(directory.path),
        "eval": {label: {k: v for k, v in r.items() if isinstance(v, int | float)} for label, r in evaluations.items()},
        "seconds": {name: result["total_seconds"] for name, result in done.items()},
        "stages": {
            name: {k: v for k, v in result.items() if k not in ("completions", "total_seconds")}
            for name, result in done.items()
        },
        "completions": next((r["completions"] for r in reversed(evaluations.values()) if r.get("completions")), []),
    }
