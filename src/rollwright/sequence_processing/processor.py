"""``SequenceProcessor``: prompts in, responses with log-probabilities and entropies out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollwright.errors import ConfigError
from rollwright.inference.request import ModelRequest
from rollwright.rollout.seeds import SampleName, request_seed
from rollwright.sequence_processing.batches import BatchedSequences, LogprobResults, decoded, gathered, own_share
from rollwright.sequence_processing.generation import (
    BatchSize,
    GenerationConfig,
    Prompt,
    check_lengths,
    dataset_prompts,
    encoded,
    generate,
)
from rollwright.sequence_processing.models import module_with_gradients, plain_model, unwrapped
from rollwright.sequence_processing.scoring import score
from rollwright.sequence_processing.shards import ShardedExperiment, ShardOptions, run_experiment
from rollwright.tracking.progress import progress_bar
from rollwright.training.parallel import from_first_rank, world_size


class SequenceProcessor:
    """Generates responses with a model in memory, and scores them.

    Generation runs on the built-in engine, which shares the model's weights, so each call samples from the current weights. Dropout is
    off in generation and scoring, even if the model is in training mode.

    Args:
        model: a Hugging Face causal language model, possibly inside DDP, FSDP, ``torch.compile`` or PEFT wrappers; see
            ``sequence_processing.models``.
        tokenizer: the model's tokenizer. If it has no pad token, its end token becomes the pad token.
        config: sampling settings and batch sizes.
        progress: whether to show progress bars. None shows them only on a terminal and in a notebook.

    Raises:
        ConfigError: the model is not a Hugging Face model, or the tokenizer has neither a pad nor an end token.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, config: GenerationConfig | None = None, *, progress: bool | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or GenerationConfig()
        self.progress = progress
        self._inner = unwrapped(model)
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token_id is None:
                raise ConfigError("The tokenizer has neither a pad nor an end token: set tokenizer.pad_token.")
            tokenizer.pad_token = tokenizer.eos_token

    @property
    def device(self) -> torch.device:
        """Device of the model and of the results."""
        return next(self.model.parameters()).device

    # ------------------------------------------------------------------ the four main methods

    def generate_with_logprobs(
        self,
        prompts: Sequence[Prompt] | None = None,
        G: int = 8,
        dataset_name: str | None = None,
        split: str = "train",
        num_prompts: int | None = None,
        seed: int | None = None,
        with_grad: bool = False,
        gen_batch_size: BatchSize | None = None,
        tf_batch_size: BatchSize | None = None,
        *,
        dataset_kwargs: dict[str, Any] | None = None,
        across_processes: bool = False,
    ) -> tuple[BatchedSequences, LogprobResults]:
        """Generate ``G`` responses to each prompt and score them.

        Args:
            prompts: strings, token ids or conversations. If None, prompts come from ``dataset_name``.
            G: number of responses to each prompt.
            dataset_name: registered dataset, or the path of a file; see ``sample_prompts``.
            split: split of the dataset.
            num_prompts: number of prompts to draw from the dataset. None uses all.
            seed: seed for drawing prompts and for sampling. With a seed, a call at the same batch sizes returns the same bits; with another
                ``gen_batch_size``, rounding may change a few responses (``BatchedSequences.share_changed``). None draws a sampling seed
                from torch's global generator.
            with_grad: let gradients flow through the log-probabilities.
            gen_batch_size, tf_batch_size: override the batch sizes of the config.
            dataset_kwargs: arguments of the dataset's builder.
            across_processes: under torchrun, divide the prompts among the processes and return all results on every process. If False,
                each process works on its own arguments.

        Returns:
            The sequences, and their log-probabilities at the sampling temperature.

        Raises:
            ConfigError: neither or both of ``prompts`` and ``dataset_name`` are given, or an argument is out of its range.
            DataError: the dataset or split is unknown.
            PromptTooLongError: a prompt fills the model's context.
        """
        chosen = self._chosen(prompts, G, dataset_name, split, num_prompts, seed, dataset_kwargs)
        ids = encoded(chosen, self.tokenizer, self.config.enable_thinking)
        first_seed = int(torch.randint(1 << 62, ())) if seed is None else seed
        config = self._config(gen_batch_size, tf_batch_size)
        if across_processes and world_size() > 1:
            if with_grad:
                raise ConfigError(
                    "with_grad keeps a graph on its process: leave across_processes off and give each its prompts."
                )
            check_lengths(ids, self._inner)  # on every process, so that no process waits for another that has raised
            shared_seed, own = from_first_rank(lambda: first_seed), own_share(len(ids))
            with plain_model(self.model) as model:
                part = ids[own.start : own.stop]
                mine = self._generate_and_score(model, part, G, shared_seed, config, own.start) if own else None
            dtype = torch.promote_types(self._inner.dtype, torch.float32)
            return gathered(ids, G, mine, self.tokenizer, self.device, dtype)
        with plain_model(self.model) as model:
            return self._generate_and_score(model, ids, G, first_seed, config, with_grad=with_grad)

    def generate_batched(
        self,
        prompts: Sequence[Prompt],
        G: int = 8,
        seed: int | None = None,
        gen_batch_size: BatchSize | None = None,
    ) -> BatchedSequences:
        """Generate ``G`` responses to each prompt. Arguments and errors are those of ``generate_with_logprobs``.

        An empty list of prompts returns an empty batch.
        """
        if isinstance(prompts, list | tuple) and not prompts:
            return BatchedSequences.from_tokens([], [], [], self.tokenizer.pad_token_id or 0, self.device)
        ids, config = (
            encoded(self._chosen(prompts, G), self.tokenizer, self.config.enable_thinking),
            self._config(gen_batch_size),
        )
        with plain_model(self.model) as model:
            return self._generate(model, ids, G, int(torch.randint(1 << 62, ())) if seed is None else seed, config)

    def teacher_force_logprobs(
        self,
        sequences: BatchedSequences,
        with_grad: bool = False,
        tf_batch_size: BatchSize | None = None,
        temperature: float | None = None,
    ) -> LogprobResults:
        """Score existing responses, which may come from this model or another.

        Args:
            sequences: prompts and responses; the results for empty responses are empty arrays.
            with_grad: let gradients flow through the log-probabilities to the model's parameters.
            tf_batch_size: overrides the batch size of the config.
            temperature: temperature of the softmax. None uses the config's sampling temperature.

        Raises:
            ConfigError: ``with_grad`` is set but no parameter requires a gradient, or the temperature is not positive.
        """
        config = self._config(tf_batch_size=tf_batch_size)
        if with_grad:
            return self._score(module_with_gradients(self.model), sequences, True, config, temperature)
        with plain_model(self.model) as model:
            return self._score(model, sequences, False, config, temperature)

    def sample_prompts(
        self,
        dataset_name: str,
        split: str = "train",
        num_prompts: int | None = None,
        seed: int | None = None,
        **dataset_kwargs: Any,
    ) -> list[str]:
        """Draw prompts without replacement.

        Args:
            dataset_name: a name in ``DATASET_REGISTRY``, the path of a ``.jsonl``, ``.json`` or ``.parquet`` file or of a
                directory of them, ``reasoning_gym:NAME``, ``module:builder``, or ``owner/name`` at Hugging Face.
            split: split of the dataset.
            num_prompts: number of prompts. None returns all prompts in the dataset's order.
            seed: the same seed draws the same prompts.
            **dataset_kwargs: arguments of the dataset's builder, such as ``path="data/gsm8k"``.

        Raises:
            DataError: the dataset (the message lists the known names) or the split is unknown.
            ConfigError: ``num_prompts`` is not between 1 and the number of prompts.
        """
        return dataset_prompts(dataset_name, split, num_prompts, seed, **dataset_kwargs)

    # ------------------------------------------------------------------ very large experiments

    def generate_to_shards(
        self,
        directory: str | Path,
        prompts: Sequence[Prompt] | None = None,
        G: int = 8,
        dataset_name: str | None = None,
        split: str = "train",
        num_prompts: int | None = None,
        seed: int | None = None,
        *,
        dataset_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> ShardedExperiment:
        """Generate and score shard by shard. Each complete shard is written to a file; only one shard is in memory at a time.

        Arguments and errors are those of ``generate_with_logprobs``. ``options`` are the fields of
        ``sequence_processing.shards.ShardOptions``: ``prompts_per_shard``, ``file_format``, ``resume``, ``sinks``, … Under torchrun the
        shards are distributed over the processes.

        Returns:
            A ``ShardedExperiment``, whose ``rows()`` reads the files back.
        """
        chosen = self._chosen(prompts, G, dataset_name, split, num_prompts, seed, dataset_kwargs)
        ids, wanted = encoded(chosen, self.tokenizer, self.config.enable_thinking), ShardOptions(**options)
        check_lengths(ids, self._inner)
        config = self._config(wanted.gen_batch_size, wanted.tf_batch_size)

        def produce(part: slice, seed: int) -> tuple[BatchedSequences, LogprobResults]:
            with plain_model(self.model) as model:
                return self._generate_and_score(model, ids[part], G, seed, config, part.start)

        return run_experiment(
            Path(directory),
            wanted,
            prompts=chosen,
            ids=ids,
            group=G,
            seed=seed,
            generation=dataclasses.asdict(config),
            model=self.model,
            tokenizer=self.tokenizer,
            produce=produce,
            show_progress=self.progress,
        )

    # ------------------------------------------------------------------ inside

    def _chosen(
        self,
        prompts: Sequence[Prompt] | None,
        G: int,
        dataset_name: str | None = None,
        split: str = "train",
        num_prompts: int | None = None,
        seed: int | None = None,
        dataset_kwargs: dict[str, Any] | None = None,
    ) -> Sequence[Prompt]:
        """Return ``prompts`` or, if None, those of the dataset; see ``generate_with_logprobs``."""
        if isinstance(G, bool) or not isinstance(G, int) or G < 1:
            raise ConfigError(f"G is {G!r}: give the number of responses to each prompt, from 1 on.")
        if prompts is not None and dataset_name is not None:
            raise ConfigError("prompts and dataset_name are both given: give one of them.")
        if prompts is not None:
            if num_prompts is not None:
                raise ConfigError("num_prompts says how many to draw from a dataset: leave it out where prompts are given.")
            return prompts
        if dataset_name is None:
            raise ConfigError("There is nothing to generate from: give prompts or dataset_name.")
        return self.sample_prompts(dataset_name, split, num_prompts, seed, **(dataset_kwargs or {}))

    def _config(self, gen_batch_size: BatchSize | None = None, tf_batch_size: BatchSize | None = None) -> GenerationConfig:
        """Return the validated config of a call, which may override batch sizes."""
        sizes = {"gen_batch_size": gen_batch_size, "tf_batch_size": tf_batch_size}
        return dataclasses.replace(self.config, **{name: size for name, size in sizes.items() if size is not None})

    def _generate_and_score(
        self,
        model: Any,
        prompts: list[list[int]],
        group: int,
        seed: int,
        config: GenerationConfig,
        first_prompt: int = 0,
        with_grad: bool = False,
    ) -> tuple[BatchedSequences, LogprobResults]:
        """Generate and score a part of an experiment, with the same seeds as in the whole; ``first_prompt`` is the part's offset."""
        sequences = self._generate(model, prompts, group, seed, config, first_prompt)
        module = module_with_gradients(self.model) if with_grad else model
        return sequences, self._score(module, sequences, with_grad, config)

    def _generate(
        self,
        model: Any,
        prompts: list[list[int]],
        group: int,
        seed: int,
        config: GenerationConfig,
        first_prompt: int = 0,
    ) -> BatchedSequences:
        total = len(prompts) * group
        check_lengths(prompts, model)
        tokens: list[list[int]] = [[]] * total
        reasons: list[str] = ["length"] * total
        if config.max_new_tokens > 0:
            gconfig = config.hyperparameters()
            requests = [  # each has its own seed, so its tokens depend neither on other requests nor on the batch size
                ModelRequest(ids, gconfig, seed=request_seed(seed, SampleName(first_prompt + b, g), 0, 0))
                for b, ids in enumerate(prompts)
                for g in range(group)
            ]
            with progress_bar(total, "generating", self.progress) as advance:
                responses = generate(
                    model,
                    self.tokenizer,
                    requests,
                    config.gen_batch_size,
                    deterministic=config.deterministic,
                    advance=advance,
                )
            tokens, reasons = [each.output_tokens for each in responses], [each.stop_reason for each in responses]
        return decoded(prompts, tokens, reasons, group, self.tokenizer, self.device)

    def _score(
        self,
        module: nn.Module,
        sequences: BatchedSequences,
        with_grad: bool,
        config: GenerationConfig,
        temperature: float | None = None,
    ) -> LogprobResults:
        if with_grad and not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError("with_grad=True, and no parameter of the model requires a gradient: unfreeze some.")
        if temperature is not None and not temperature > 0:
            raise ConfigError(f"temperature is {temperature}: give a positive one; greedy responses are scored at 1.")
        with progress_bar(sequences.sequences.shape[:2].numel(), "scoring", self.progress) as advance:
            return score(
                module,
                sequences,
                inner=self._inner,
                temperature=config.logprob_temperature if temperature is None else temperature,
                batch_size=config.tf_batch_size,
                with_grad=with_grad,
                may_halve=not config.deterministic,
                advance=advance,
            )
