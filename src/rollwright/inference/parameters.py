"""Generation parameters on the wire: for each engine, every field of ``GenerationHyperparameters`` is honoured or refused.

``PARAMETERS`` is the one table; a test walks it for the three engines, so that a new field cannot be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError

#: What is asked of the log-probabilities: those before top-p, top-k and penalties, or also others, flagged as such.
Refusal = Callable[[GenerationHyperparameters], str | None]


def _never(gconfig: GenerationHyperparameters) -> str | None:
    return None


@dataclass(frozen=True)
class Wire:
    """How one field travels to a server.

    Attributes:
        key: the server's name in ``sampling_params``; None where the field acts on this side.
        shifts_logprobs: the server's log-probabilities are taken after this parameter was applied, unlike the contract.
        refusal: the reason why a value cannot be honoured at all, or None.
    """

    key: str | None
    shifts_logprobs: bool = False
    refusal: Refusal = _never


@dataclass(frozen=True)
class Parameter:
    """One field of ``GenerationHyperparameters`` on the three engines.

    The built-in engine has no wire: it honours every field but an ``n_samples`` above 1, and refuses values outside their
    limits (``backends.builtin.scheduler``).
    """

    name: str
    sglang: Wire
    vllm: Wire


def _stop_before_minimum(gconfig: GenerationHyperparameters) -> str | None:
    if gconfig.stop and gconfig.min_new_tokens > 0:
        return "its stop strings end a request before min_new_tokens; use stop_token_ids, or min_new_tokens=0"
    return None


def _not_one(gconfig: GenerationHyperparameters) -> str | None:
    if gconfig.n_samples != 1:
        return "one request is one completion; send n_samples requests, each with gconfig.new(n_samples=1)"
    return None


_ON_THIS_SIDE = Wire(None)

#: Every field, in the order of the dataclass.
PARAMETERS: tuple[Parameter, ...] = (
    Parameter("n_samples", Wire(None, refusal=_not_one), Wire(None, refusal=_not_one)),
    Parameter("max_new_tokens", Wire("max_new_tokens"), Wire("max_tokens")),
    Parameter(
        "min_new_tokens",
        Wire("min_new_tokens", shifts_logprobs=True, refusal=_stop_before_minimum),
        Wire("min_tokens", shifts_logprobs=True),
    ),
    Parameter("greedy", Wire("temperature"), Wire("temperature")),
    Parameter("temperature", Wire("temperature"), Wire("temperature")),
    Parameter("top_p", Wire("top_p"), Wire("top_p", shifts_logprobs=True)),
    Parameter("top_k", Wire("top_k"), Wire("top_k", shifts_logprobs=True)),
    Parameter(
        "frequency_penalty", Wire("frequency_penalty", shifts_logprobs=True), Wire("frequency_penalty", shifts_logprobs=True)
    ),
    Parameter("stop", Wire("stop"), Wire("stop")),
    Parameter("stop_token_ids", Wire("stop_token_ids"), Wire("stop_token_ids")),
    Parameter("ignore_eos", Wire("ignore_eos"), Wire("ignore_eos")),
    Parameter("skip_special_tokens", Wire("skip_special_tokens"), Wire("skip_special_tokens")),
    Parameter("seed", Wire("sampling_seed"), Wire("seed")),
)

_NEUTRAL = GenerationHyperparameters()
#: top_k at or above this asks for all tokens: no vocabulary is as large. SGLang writes 2³⁰, AReaL 10⁸.
_ALL_TOKENS = 10_000_000


def limits_top_k(gconfig: GenerationHyperparameters) -> bool:
    """True where top_k leaves tokens out: 0, negative and huge values do not."""
    return 0 < gconfig.top_k < _ALL_TOKENS


def _is_neutral(gconfig: GenerationHyperparameters, name: str) -> bool:
    if name == "top_k":
        return not limits_top_k(gconfig)
    return getattr(gconfig, name) == getattr(_NEUTRAL, name)


def check_parameters(
    gconfig: GenerationHyperparameters,
    engine: str,
    *,
    where: str,
    gives_contract_logprobs: bool = False,
    accept_shifted: bool = False,
) -> bool:
    """Refuse what a server cannot honour.

    Args:
        gconfig: the generation arguments of a request.
        engine: ``"sglang"`` or ``"vllm"``: whose row of ``PARAMETERS`` counts.
        where: the server, for the message.
        gives_contract_logprobs: the server takes log-probabilities before top-p, top-k and penalties (``rollwright
            serve-model`` does), so nothing shifts them.
        accept_shifted: shifted log-probabilities are asked for all the same; the response is flagged, and the trainer has
            to recompute them.

    Returns:
        True where the log-probabilities of the response are shifted.

    Raises:
        EngineError: a value cannot be honoured, or would shift log-probabilities without being asked to.
    """
    shifted = False
    for parameter in PARAMETERS:
        wire: Wire = getattr(parameter, engine)
        if _is_neutral(gconfig, parameter.name):
            continue
        value = f"{parameter.name}={getattr(gconfig, parameter.name)!r}"
        reason = None if gives_contract_logprobs and parameter.name != "n_samples" else wire.refusal(gconfig)
        if reason:
            raise EngineError(f"{value} cannot be honoured by the {engine} server at {where}: {reason}.")
        if not wire.shifts_logprobs or gives_contract_logprobs or (gconfig.is_greedy and parameter.name in ("top_p", "top_k")):
            continue
        if not accept_shifted:
            raise EngineError(
                f"{value} is refused by the client of the {engine} server at {where}: it gives log-probabilities after this "
                "parameter, not those that training needs. Leave it at its default, use the built-in engine, or set "
                "rollout.accept_shifted_logprobs and let the trainer recompute them (actor.recompute_logprob)."
            )
        shifted = True
    return shifted


def sglang_sampling_params(gconfig: GenerationHyperparameters, seed: int | None) -> dict[str, Any]:
    """``sampling_params`` of SGLang's ``/generate``; a greedy request has temperature 0, as SGLang writes it."""
    return {
        "max_new_tokens": gconfig.max_new_tokens,
        "min_new_tokens": gconfig.min_new_tokens,
        "temperature": 0.0 if gconfig.is_greedy else gconfig.temperature,
        "top_p": 1.0 if gconfig.is_greedy else gconfig.top_p,
        "top_k": gconfig.top_k if limits_top_k(gconfig) and not gconfig.is_greedy else -1,
        "frequency_penalty": gconfig.frequency_penalty,
        "stop": list(gconfig.stop) if gconfig.stop else None,
        "stop_token_ids": list(gconfig.stop_token_ids) or None,
        "ignore_eos": gconfig.ignore_eos,
        "skip_special_tokens": gconfig.skip_special_tokens,
        "no_stop_trim": True,  # output_tokens keeps the tokens of the stop string
        "sampling_seed": seed,
    }


def vllm_sampling_params(gconfig: GenerationHyperparameters, seed: int | None) -> dict[str, Any]:
    """``sampling_params`` of vLLM's ``/inference/v1/generate``."""
    return {
        "max_tokens": gconfig.max_new_tokens,
        "min_tokens": gconfig.min_new_tokens,
        "temperature": 0.0 if gconfig.is_greedy else gconfig.temperature,
        "top_p": 1.0 if gconfig.is_greedy else gconfig.top_p,
        "top_k": gconfig.top_k if limits_top_k(gconfig) and not gconfig.is_greedy else 0,
        "frequency_penalty": gconfig.frequency_penalty,
        "stop": list(gconfig.stop) if gconfig.stop else None,
        "stop_token_ids": list(gconfig.stop_token_ids) or None,
        "ignore_eos": gconfig.ignore_eos,
        "skip_special_tokens": gconfig.skip_special_tokens,
        "include_stop_str_in_output": True,
        "logprobs": 0,
        "seed": seed,
    }
