"""Generation parameters on the wire: each field of ``GenerationHyperparameters`` is either honoured by a server or rejected.

Each server backend has one ``ParameterTable``. A test checks the tables of SGLang and vLLM, so that a new field cannot be forgotten.
The built-in engine needs no table: it honours every field except an ``n_samples`` above 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError

_NEUTRAL = GenerationHyperparameters()
#: A top_k of at least this means all tokens, because no vocabulary is as large. SGLang writes 2³⁰, others 10⁸.
_ALL_TOKENS = 10_000_000


@dataclass(frozen=True)
class Wire:
    """How one field is sent to a server.

    Attributes:
        key: the server's name in ``sampling_params``. None means that the field takes effect in this process.
        shifts_logprobs: the server takes log-probabilities after applying this parameter, which violates the contract.
        inside: if set, the value is wrapped in an object under this name.
        refusal: returns the reason why a value cannot be honoured, or None.
    """

    key: str | None
    shifts_logprobs: bool = False
    inside: str | None = None
    refusal: Callable[[GenerationHyperparameters], str | None] = lambda gconfig: None


_UNKNOWN = Wire(None, refusal=lambda gconfig: "it has no such parameter")
_ONE_COMPLETION = Wire(
    None, refusal=lambda gconfig: "one request is one completion; send n_samples requests, each with gconfig.new(n_samples=1)"
)


@dataclass(frozen=True)
class ParameterTable:
    """How the fields are sent to one kind of server.

    Attributes:
        wires: how each field is sent, or just the server's name for the field. All other fields must keep their defaults.
        all_tokens: the server's ``top_k`` for "all tokens".
        always: parameters of every request.
    """

    wires: Mapping[str, Wire | str]
    all_tokens: int = -1
    always: Mapping[str, Any] | None = None

    def wire(self, field: str) -> Wire:
        """Return how one field is sent; greedy sampling is sent as a temperature of 0."""
        wire = self.wires.get("temperature" if field == "greedy" else field, _UNKNOWN)
        return Wire(wire) if isinstance(wire, str) else _ONE_COMPLETION if field == "n_samples" else wire

    def check(
        self,
        gconfig: GenerationHyperparameters,
        where: str,
        *,
        gives_contract_logprobs: bool = False,
        accept_shifted: bool = False,
    ) -> bool:
        """Check that a server can honour the generation arguments of a request.

        Args:
            gconfig: generation arguments of a request.
            where: the server, for the message.
            gives_contract_logprobs: the server takes log-probabilities before top-p, top-k and penalties, as ``rollwright
                serve-model`` does, so nothing shifts them.
            accept_shifted: allow shifted log-probabilities. The response is flagged, and the trainer has to recompute them.

        Returns:
            True if the log-probabilities of the response are shifted.

        Raises:
            EngineError: a value cannot be honoured, or it shifts log-probabilities and that is not allowed.
        """
        shifted = False
        for name in (field.name for field in fields(gconfig)):
            if getattr(gconfig, name) == getattr(_NEUTRAL, name) or (name == "top_k" and not limits_top_k(gconfig)):
                continue
            wire, value = self.wire(name), f"{name}={getattr(gconfig, name)!r}"
            reason = None if gives_contract_logprobs and name != "n_samples" else wire.refusal(gconfig)
            if reason:
                raise EngineError(f"{value} cannot be honoured by {where}: {reason}.")
            if (
                not wire.shifts_logprobs
                or gives_contract_logprobs
                or (gconfig.is_greedy and name in ("top_p", "top_k", "min_p"))
            ):
                continue
            if not accept_shifted:
                raise EngineError(
                    f"{value} is refused by the client of {where}: it gives log-probabilities after this parameter, not those "
                    "that training needs. Leave it at its default, use the built-in engine, or set "
                    "rollout.accept_shifted_logprobs and let the trainer recompute them (actor.recompute_logprob)."
                )
            shifted = True
        return shifted

    def sampling_params(self, gconfig: GenerationHyperparameters, seed: int | None) -> dict[str, Any]:
        """Return the parameters under the server's names; a greedy request has temperature 0."""
        limits = limits_top_k(gconfig) and not gconfig.is_greedy
        values = {
            "max_new_tokens": gconfig.max_new_tokens,
            "min_new_tokens": gconfig.min_new_tokens,
            "temperature": 0.0 if gconfig.is_greedy else gconfig.temperature,
            "top_p": 1.0 if gconfig.is_greedy else gconfig.top_p,
            "top_k": gconfig.top_k if limits else self.all_tokens,
            "min_p": gconfig.min_p or None,
            "frequency_penalty": gconfig.frequency_penalty,
            "presence_penalty": gconfig.presence_penalty or None,
            "repetition_penalty": None if gconfig.repetition_penalty == 1.0 else gconfig.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in gconfig.logit_bias.items()} or None,
            "json_schema": gconfig.json_schema,
            "regex": gconfig.regex,
            "grammar": gconfig.grammar,
            "stop": list(gconfig.stop) if gconfig.stop else None,
            "stop_token_ids": list(gconfig.stop_token_ids) or None,
            "ignore_eos": gconfig.ignore_eos,
            "skip_special_tokens": gconfig.skip_special_tokens,
            "seed": seed,
        }
        always = ("stop", "stop_token_ids", "seed")  # servers expect these keys, with null if unset
        wires = {name: self.wire(name) for name, value in values.items() if value is not None or name in always}
        named = {
            wire.key: {wire.inside: values[name]} if wire.inside else values[name] for name, wire in wires.items() if wire.key
        }
        return named | dict(self.always or {})


def limits_top_k(gconfig: GenerationHyperparameters) -> bool:
    """True if top_k excludes tokens; 0, negative and huge values do not."""
    return 0 < gconfig.top_k < _ALL_TOKENS
