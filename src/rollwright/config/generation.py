"""Generation arguments: how tokens are sampled. The same class is AReaL's ``gconfig`` and Trinity's ``rollout_args``."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field, fields
from typing import Any

from rollwright.errors import ConfigError

#: Names that users of other systems know, and the field each stands for.
ALIASES = {"n": "n_samples", "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


@functools.cache
def _field_names(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls))


@dataclass
class GenerationHyperparameters:
    """How one request is sampled.

    Log-probabilities are those of the temperature-scaled softmax before top-p, top-k and penalties; greedy counts as
    temperature 1.
    """

    n_samples: int = field(default=1, metadata={"help": "Samples of each task (the group size of GRPO).", "ge": 1})
    max_new_tokens: int = field(default=512, metadata={"help": "Most tokens that one request may generate.", "ge": 1})
    min_new_tokens: int = field(
        default=0, metadata={"help": "No end token, stop id or stop string ends a request before so many tokens.", "ge": 0}
    )
    greedy: bool = field(default=False, metadata={"help": "Take the most likely token; temperature is then ignored."})
    temperature: float = field(default=1.0, metadata={"help": "Softmax temperature; 0 means greedy.", "ge": 0.0})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus: smallest set with this probability.", "gt": 0.0, "le": 1.0})
    top_k: int = field(default=0, metadata={"help": "Only the k most likely tokens; 0, -1 or a huge value: all."})
    frequency_penalty: float = field(
        default=0.0, metadata={"help": "Subtracted from a logit for each time its token was generated.", "ge": -2.0, "le": 2.0}
    )
    stop: list[str] | None = field(
        default=None, metadata={"help": "Strings that end a request; the tokens of the string are kept in output_tokens."}
    )
    stop_token_ids: list[int] = field(default_factory=list, metadata={"help": "Token ids that end a request; kept in output."})
    ignore_eos: bool = field(default=False, metadata={"help": "Go on after the end token (forced lengths, benchmarks)."})
    skip_special_tokens: bool = field(default=True, metadata={"help": "Leave special tokens out of decoded text."})
    seed: int | None = field(default=None, metadata={"help": "Seed of the request; None: derived from the run's seed."})

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]

    @property
    def n(self) -> int:
        """Another name for ``n_samples``."""
        return self.n_samples

    @n.setter
    def n(self, value: int) -> None:
        self.n_samples = value

    @property
    def max_tokens(self) -> int:
        """Another name for ``max_new_tokens``."""
        return self.max_new_tokens

    @max_tokens.setter
    def max_tokens(self, value: int) -> None:
        self.max_new_tokens = value

    @property
    def is_greedy(self) -> bool:
        """True where the most likely token is taken."""
        return self.greedy or self.temperature == 0.0

    @property
    def effective_temperature(self) -> float:
        """The temperature that log-probabilities are given at: 1 where sampling is greedy."""
        return 1.0 if self.is_greedy else self.temperature

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """A copy with ``changes``; the aliases ``n``, ``max_tokens`` and ``min_tokens`` are understood.

        Raises:
            ConfigError: a name is not a generation argument.
        """
        known = _field_names(type(self))
        changes = {ALIASES.get(key, key): value for key, value in changes.items()}
        if unknown := sorted(set(changes) - known):
            raise ConfigError(f"GenerationHyperparameters has no {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
        made = copy.copy(self)  # not dataclasses.replace: every request and record makes one
        made.stop = None if self.stop is None else list(self.stop)
        made.stop_token_ids = list(self.stop_token_ids)
        for name, value in changes.items():
            setattr(made, name, value)
        made.__post_init__()
        return made

    @classmethod
    def from_names(cls, **names: Any) -> GenerationHyperparameters:
        """Build from field names or their aliases (Trinity's ``rollout_args``)."""
        return cls().new(**names)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """A copy whose ``stop_token_ids`` also hold the tokenizer's end and pad tokens, where it has them."""
        stop_ids = list(self.stop_token_ids)
        for token_id in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            if token_id is not None and token_id not in stop_ids:
                stop_ids.append(token_id)
        return self.new(stop_token_ids=stop_ids)
