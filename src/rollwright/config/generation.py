"""Generation arguments: how tokens are sampled. The same class is ``gconfig`` and a task's ``rollout_args``."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollwright.config import key, key_from
from rollwright.errors import ConfigError

#: Other names of fields.
ALIASES = {"n": "n_samples", "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


#: Names of the arguments when accessed as a dict.
_AS_IN_DICTS = {"n_samples": "n", "max_new_tokens": "max_tokens"}


def _second_name(name: str) -> Any:
    """Return a property that reads and sets another attribute."""
    return property(
        lambda instance: getattr(instance, name),
        lambda instance, value: setattr(instance, name, value),
        doc=f"Another name for ``{name}``.",
    )


#: Formats of OpenAI's APIs: their name for ``max_new_tokens``, and the further arguments that they accept.
_API_FORMATS: dict[str, tuple[str, set[str]]] = {
    "completions": (
        "max_completion_tokens",
        {"frequency_penalty", "presence_penalty", "n_samples", "stop", "seed", "logit_bias"},
    ),
    "responses": ("max_output_tokens", set()),
    "openai-agents": ("max_tokens", {"frequency_penalty", "presence_penalty"}),
}
#: Arguments that a request to one of our own OpenAI fronts includes if they are not the default.
_REQUEST_ARGUMENTS = (
    *(
        "n_samples",
        "stop",
        "seed",
        "logit_bias",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "top_k",
        "min_p",
    ),
    *("min_new_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
)


@dataclass
class GenerationHyperparameters:
    """How one request is sampled.

    Log-probabilities are those of the temperature-scaled softmax before top-p, top-k, min-p, bias, penalties and grammars; greedy counts as
    temperature 1.
    """

    n_samples: int = key(1, "Samples of each task (the group size of GRPO).", ge=1)
    max_new_tokens: int = key(512, "Maximum number of tokens that one request may generate.", ge=1)
    min_new_tokens: int = key(0, "Number of tokens before which no end token, stop id or stop string ends a request.", ge=0)
    greedy: bool = key(False, "Take the most likely token; temperature is then ignored.")
    temperature: float = key(1.0, "Softmax temperature; 0 means greedy.", ge=0.0)
    top_p: float = key(1.0, "Nucleus: smallest set with this probability.", gt=0.0, le=1.0)
    top_k: int = key(0, "Sample from the k most likely tokens; 0, -1 or a huge value disables the limit.")
    min_p: float = key(0.0, "Leave out tokens whose probability is below this share of the most likely one's.", ge=0.0, le=1.0)
    frequency_penalty: float = key(0.0, "Subtracted from a logit for each time its token was generated.", ge=-2.0, le=2.0)
    presence_penalty: float = key(0.0, "Subtracted from the logit of each token that was generated.", ge=-2.0, le=2.0)
    repetition_penalty: float = key(
        1.0, "Divides the logit, or multiplies a negative one, of each token of the prompt and the output.", gt=0.0, le=10.0
    )
    logit_bias: dict[int, float] = key_from(dict, "Added to the logits of these token ids.")
    json_schema: str | None = key(None, "JSON Schema, as JSON text, that the output has to follow.")
    regex: str | None = key(None, "Regular expression that the whole output has to match.")
    grammar: str | None = key(None, "Lark grammar (in llguidance's dialect) that the output has to follow; built-in engine.")
    stop: list[str] | None = key(None, "Strings that end a request; the tokens of the string are kept in output_tokens.")
    stop_token_ids: list[int] = key_from(list, "Token ids that end a request; kept in output.")
    ignore_eos: bool = key(False, "Continue after the end token (forced lengths, benchmarks).")
    skip_special_tokens: bool = key(True, "Leave special tokens out of decoded text.")
    seed: int | None = key(None, "Seed of the request. Default: derived from the run's seed.")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if isinstance(self.json_schema, dict):
            self.json_schema = json.dumps(self.json_schema)
        if any(isinstance(token, str) for token in self.logit_bias):  # as JSON has them
            self.logit_bias = {int(token): bias for token, bias in self.logit_bias.items()}

    n = _second_name("n_samples")
    max_tokens = _second_name("max_new_tokens")

    # Ported workflows use ``self.rollout_args`` as a dict, so ``**``, ``["n"]`` and ``.get("n")`` work.

    def keys(self) -> list[str]:
        """Return the argument names, with ``n`` for ``n_samples`` and ``max_tokens`` for ``max_new_tokens``."""
        return [_AS_IN_DICTS.get(name, name) for name in self.__dataclass_fields__]

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, ALIASES.get(name, name))

    def __setitem__(self, name: str, value: Any) -> None:
        vars(self).update(vars(self.new(**{name: value})))

    def __contains__(self, name: object) -> bool:
        return ALIASES.get(str(name), name) in self.__dataclass_fields__

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument by name, or ``default`` if there is no argument of that name."""
        return getattr(self, ALIASES.get(name, name)) if name in self else default

    def items(self) -> list[tuple[str, Any]]:
        """Return names and values."""
        return [(name, self[name]) for name in self]

    def copy(self) -> dict[str, Any]:
        """Return a copy of the arguments as a dict."""
        return dict(self.items())

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.greedy or self.temperature == 0.0

    @property
    def adjusts_scores(self) -> bool:
        """True if a bias, a penalty or a grammar changes the scores from which tokens are drawn."""
        penalties = self.frequency_penalty, self.presence_penalty, self.repetition_penalty != 1.0, self.logit_bias
        return any(penalties) or any(text is not None for text in (self.json_schema, self.regex, self.grammar))

    @property
    def effective_temperature(self) -> float:
        """The temperature of the returned log-probabilities: 1 if sampling is greedy."""
        return 1.0 if self.is_greedy else self.temperature

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Return a copy with ``changes``, which may use the aliases ``n``, ``max_tokens`` and ``min_tokens``.

        Raises:
            ConfigError: a name is not a generation argument.
        """
        known = self.__dataclass_fields__
        changes = {ALIASES.get(key, key): value for key, value in changes.items()}
        if unknown := sorted(changes.keys() - known):
            raise ConfigError(f"GenerationHyperparameters has no {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
        made = type(self).__new__(type(self))  # not copy.copy or dataclasses.replace: runs for every request and record
        vars(made).update(vars(self))
        made.stop = None if self.stop is None else list(self.stop)
        made.stop_token_ids = list(self.stop_token_ids)
        made.logit_bias = dict(self.logit_bias)
        for name, value in changes.items():
            setattr(made, name, value)
        made.__post_init__()
        return made

    @classmethod
    def from_names(cls, **names: Any) -> GenerationHyperparameters:
        """Build from field names or their aliases (those of ported ``rollout_args``)."""
        return cls().new(**names)

    def to_openai_args_dict(self, exclude_args: Sequence[str] | None = None, api_format: str = "completions") -> dict[str, Any]:
        """Return the arguments for an OpenAI client's ``create``; arguments that its API lacks are in ``extra_body``.

        Args:
            exclude_args: names of the fields to leave out, or their aliases.
            api_format: ``completions``, ``responses``, or ``openai-agents`` for a ``ModelSettings``.

        Raises:
            ConfigError: the format is unknown.
        """
        if api_format not in _API_FORMATS:
            raise ConfigError(f"to_openai_args_dict(api_format={api_format!r}): it is one of {', '.join(_API_FORMATS)}.")
        limit, further = _API_FORMATS[api_format]
        names, own = (
            {"max_new_tokens": limit, "n_samples": "n", "min_new_tokens": "min_tokens"},
            {"max_new_tokens", "temperature", "top_p", *further},
        )
        given: dict[str, Any] = {"temperature": 0.0 if self.is_greedy else self.temperature, "top_p": self.top_p}
        defaults = GenerationHyperparameters()
        for name in ("max_new_tokens", *_REQUEST_ARGUMENTS):
            if (value := getattr(self, name)) != getattr(defaults, name) or name == "max_new_tokens":
                given[name] = value
        for excluded in exclude_args or ():
            given.pop(ALIASES.get(excluded, excluded), None)
        arguments = {names.get(name, name): value for name, value in given.items() if name in own}
        if others := {names.get(name, name): value for name, value in given.items() if name not in own}:
            arguments["extra_body"] = others
        return arguments

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """Return a copy whose ``stop_token_ids`` also include the tokenizer's end and pad tokens, if it has them.

        A transformers tokenizer is modified in place: its ``apply_chat_template(tokenize=True)`` then returns token ids.
        """
        if any(base.__name__ == "PreTrainedTokenizerBase" for base in type(tokenizer).__mro__):
            returning_ids(tokenizer)
        own = [token_id for token_id in (tokenizer.eos_token_id, tokenizer.pad_token_id) if token_id is not None]
        return self.new(stop_token_ids=list(dict.fromkeys([*self.stop_token_ids, *own])))


def _takes_second_names(made: Any) -> Any:
    """Wrap a constructor to also accept ``n``, ``max_tokens``, ``min_tokens``, and ``logprobs`` (always recorded)."""

    @functools.wraps(made)
    def init(self: Any, *arguments: Any, **names: Any) -> None:
        names.pop("logprobs", None)
        made(self, *arguments, **{ALIASES.get(name, name): value for name, value in names.items()})

    return init


GenerationHyperparameters.__init__ = _takes_second_names(GenerationHyperparameters.__init__)


class ReturnsIds:
    """Mixin for a tokenizer's class that makes ``apply_chat_template(tokenize=True)`` return token ids.

    transformers 5 returns a ``BatchEncoding`` by default, whose ``list()`` is its key names. ``return_dict=True`` still returns one.
    """

    def apply_chat_template(self, conversation: Any, *args: Any, return_dict: bool = False, **kwargs: Any) -> Any:
        """Call the tokenizer's own method, by default with ``return_dict=False``, which gives ``list[int]`` for one conversation."""
        return super().apply_chat_template(conversation, *args, return_dict=return_dict, **kwargs)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        return _rebuild, (type(self).__mro__[2], self.__dict__)


def _rebuild(base: type, state: dict[str, Any]) -> Any:
    tokenizer: Any = object.__new__(base)
    tokenizer.__dict__.update(state)
    return returning_ids(tokenizer)


@functools.cache
def _class_returning_ids(base: type) -> type:
    return type(base.__name__, (ReturnsIds, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def returning_ids(tokenizer: Any) -> Any:
    """Make a tokenizer's ``apply_chat_template(tokenize=True)`` return ids, in place, and return the tokenizer."""
    if not isinstance(tokenizer, ReturnsIds):
        tokenizer.__class__ = _class_returning_ids(type(tokenizer))
    return tokenizer
