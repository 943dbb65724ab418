"""How sequences are generated and scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import ConfigError
from rollwright.sequence_processing.stop_after_answer import ANSWER_END

BatchSize = int | Literal["auto"]


@dataclass
class GenerationConfig:
    """Sampling, and how much is computed at a time.

    Log-probabilities and entropies are those of the softmax of ``logits / temperature``, before ``top_p``;
    ``temperature=1.0`` gives the untempered ones. Greedy decoding counts as temperature 1.

    Attributes:
        temperature: softmax temperature; 0 means greedy.
        top_p: sample from the smallest set of tokens with this probability.
        max_new_tokens: most tokens of a response, end token included.
        do_sample: False takes the most likely token.
        gen_batch_size: sequences decoded at once; when one ends, the next takes its place. ``"auto"``: from free memory.
        tf_batch_size: sequences in one teacher-forced forward pass. ``"auto"``: from free memory.
        stop_after_answer: end a response after ``</answer>``, which it includes.
        stop: further strings that end a response, included in it.
        deterministic: the same seed gives the same bits on one machine: batch sizes must be numbers, and running out of
            memory is an error instead of a reason to halve them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 200
    do_sample: bool = True

    gen_batch_size: BatchSize = 32
    tf_batch_size: BatchSize = 64

    stop_after_answer: bool = True
    stop: list[str] | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse what cannot be carried out.

        Raises:
            ConfigError: a value is out of its range; the message names it.
        """
        if not self.temperature >= 0:
            raise ConfigError(f"GenerationConfig.temperature is {self.temperature}: give 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"GenerationConfig.top_p is {self.top_p}: give a probability above 0 and at most 1.")
        if self.max_new_tokens < 0:
            raise ConfigError(f"GenerationConfig.max_new_tokens is {self.max_new_tokens}: give 0 or more.")
        for name in ("gen_batch_size", "tf_batch_size"):
            check_batch_size(name, getattr(self, name), self.deterministic)

    @property
    def logprob_temperature(self) -> float:
        """The temperature that log-probabilities are given at."""
        return self.temperature if self.do_sample and self.temperature > 0 else 1.0

    def hyperparameters(self) -> GenerationHyperparameters:
        """The same as generation arguments of an engine."""
        stop = ([ANSWER_END] if self.stop_after_answer else []) + list(self.stop or [])
        return GenerationHyperparameters(
            max_new_tokens=self.max_new_tokens,
            greedy=not self.do_sample,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=stop or None,
        )


def check_batch_size(name: str, value: BatchSize, deterministic: bool) -> None:
    """See that a batch size is a number from 1 on, or ``"auto"`` where that is allowed.

    Raises:
        ConfigError: it is not.
    """
    if value == "auto":
        if deterministic:
            raise ConfigError(f"{name} is 'auto', which goes by free memory; a deterministic run needs a number.")
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}: give a number from 1 on, or 'auto'.")
