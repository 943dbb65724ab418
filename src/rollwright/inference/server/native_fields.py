"""What ``/generate`` takes, in SGLang's names: honoured, or refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.parameters import limits_top_k
from rollwright.inference.server.errors import RequestError, refuse_outside

#: Sampling parameters that are honoured: SGLang's name, accepted types, limits.
_NUMBER = (int, float)
SAMPLING: dict[str, tuple[tuple[type, ...], float | None, float | None]] = {
    "max_new_tokens": ((int,), 1, None),
    "min_new_tokens": ((int,), 0, None),
    "temperature": (_NUMBER, 0.0, 100.0),
    "top_p": (_NUMBER, 0.0, 1.0),
    "top_k": ((int,), -1, None),
    "frequency_penalty": (_NUMBER, -2.0, 2.0),
    "stop": ((str, list), None, None),
    "stop_token_ids": ((list,), None, None),
    "ignore_eos": ((bool,), None, None),
    "skip_special_tokens": ((bool,), None, None),
    "no_stop_trim": ((bool,), None, None),
    "sampling_seed": ((int,), None, None),
    "n": ((int,), 1, None),
    "spaces_between_special_tokens": ((bool,), None, None),
}

#: Parameters of SGLang that this server has no counterpart of, with the values that ask for nothing.
NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "min_p": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "stop_regex": ("", []),
    "logit_bias": ({},),
    "json_schema": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "structural_tag": ("",),
    "beam_width": (1,),
    "custom_params": ({},),
    "stream_interval": (1,),
    "watermark": (),
}

#: Fields of the request that are honoured.
REQUEST = frozenset(
    [
        "rid",
        "text",
        "input_ids",
        "sampling_params",
        "return_logprob",
        "stream",
        "position_ids",
        "branch_ids",
        "return_text_in_logprobs",
        "return_prompt_token_ids",
    ]
)
#: Fields that tell SGLang's routers, queues, caches and logs how to handle a request: they cannot change what is sampled.
IGNORED_REQUEST = frozenset(
    [
        "session_id",
        "conversation_id",
        "routing_key",
        "routed_dp_rank",
        "data_parallel_rank",
        "priority",
        "extra_key",
        "cache_salt",
        "kv_hints",
        "log_metrics",
        "no_logs",
        "custom_labels",
        "external_trace_header",
        "received_time",
        "http_worker_ipc",
    ]
)
#: Fields of SGLang that this server has no counterpart of, with the values that ask for nothing.
NEUTRAL_REQUEST: dict[str, tuple[Any, ...]] = {
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": ([],),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "modalities": ([],),
    "use_audio_in_video": (False,),
    "input_embeds": ([],),
    "lora_path": ("",),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "return_indexer_topk": (False,),
    "return_sampling_mask": (False,),
    "return_entropy": (False,),
    "return_bytes": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (False,),
    "session_params": ({},),
    "custom_logit_processor": ("",),
    "background": (False,),
    "require_reasoning": (False,),
}

_WHY = {
    "image_data": "the model behind this server reads token ids only; pixel values travel only to the built-in engine in process",
    "lora_path": "this server serves one set of weights",
    "top_logprobs_num": "only the sampled token's log-probability is known",
    "logprob_start_len": "the prompt is not scored",
}


def check_request(body: Mapping[str, Any]) -> None:
    """Refuse what this server cannot do.

    Raises:
        RequestError: a field is unknown, or asks for what is not there.
    """
    for name, value in body.items():
        if name in REQUEST or name in IGNORED_REQUEST or value is None:
            continue
        if name not in NEUTRAL_REQUEST:
            known = ", ".join(sorted([*REQUEST, *NEUTRAL_REQUEST]))
            raise RequestError(f"Unknown field {name!r} of /generate; known are {known}.", param=name)
        neutral = NEUTRAL_REQUEST[name]
        for_each_prompt = value if isinstance(value, list) else [value]
        if value not in neutral and any(item is not None and item not in neutral for item in for_each_prompt):
            raise RequestError(f"{name} cannot be honoured: {_WHY.get(name, 'this server has no such thing')}.", param=name)


def generation_arguments(params: Any) -> tuple[GenerationHyperparameters, bool]:
    """Generation arguments from SGLang's ``sampling_params``.

    Returns:
        The arguments (``n_samples`` holds n), and whether stop strings are kept in the text.

    Raises:
        RequestError: a parameter is unknown, of a wrong type or out of range.
    """
    if params is None:
        params = {}
    if not isinstance(params, dict):
        raise RequestError("sampling_params has to be an object.", param="sampling_params")
    values: dict[str, Any] = {}
    for name, value in params.items():
        if value is None:
            continue
        if name in NEUTRAL_SAMPLING:
            if value not in NEUTRAL_SAMPLING[name]:
                raise RequestError(f"{name}={value!r} cannot be honoured: the engine has no {name}.", param=name)
            continue
        if name not in SAMPLING:
            raise RequestError(f"Unknown sampling parameter {name!r}; known are {', '.join(sorted(SAMPLING))}.", param=name)
        kinds, low, high = SAMPLING[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise RequestError(f"{name} is {value!r}; it has to be {' or '.join(kind.__name__ for kind in kinds)}.", param=name)
        if isinstance(value, _NUMBER):
            refuse_outside(name, value, low, high)
        values[name] = value
    keep_stop = bool(values.pop("no_stop_trim", False))
    values.pop("spaces_between_special_tokens", None)
    if values.get("top_p") == 0:
        raise RequestError("top_p=0 leaves no token; use temperature=0 for greedy sampling.", param="top_p")
    gconfig = GenerationHyperparameters(
        n_samples=values.get("n", 1),
        max_new_tokens=values.get("max_new_tokens", 128),
        min_new_tokens=values.get("min_new_tokens", 0),
        temperature=float(values.get("temperature", 1.0)),
        top_p=float(values.get("top_p", 1.0)),
        top_k=values.get("top_k", 0),
        frequency_penalty=float(values.get("frequency_penalty", 0.0)),
        stop=values.get("stop"),
        stop_token_ids=values.get("stop_token_ids", []),
        ignore_eos=values.get("ignore_eos", False),
        skip_special_tokens=values.get("skip_special_tokens", True),
        seed=values.get("sampling_seed"),
    )
    if not limits_top_k(gconfig):
        gconfig.top_k = 0
    return gconfig, keep_stop
