"""Every causal family that the installed transformers can build tiny, past every regime that its configuration names.

A *case* is a family with settings that put a row of ``LENGTH`` tokens past a regime: a sliding window, a chunk of attention, the length
that rotary positions were trained for, attention sinks. ``made`` builds its model with random weights, which are scaled until each regime
matters: switched off, the untouched forward gives some token another log-probability by ``MATTERS`` nats or more. A case whose regimes
cannot be shown to matter covers nothing, and is listed so.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WINDOW = 40
TRAINED = 48  # positions that rotary frequencies were trained for, where a case scales them
LENGTH = 100  # tokens of a row, past each of them
LONGEST = 256  # positions that a model takes
MATTERS = 0.1
VOCABULARY = 96
FIRST_ORDINARY = 8  # tokens below are begin, end, padding and the like
_SCALES = (3.0, 6.0, 12.0, 25.0, 50.0, 1.0)

#: What sizes are called in configurations, and what they are here.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim_model", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "attention_head_dim", "v_head_dim", "global_head_dim", "dim_head", "swa_head_dim", "d_kv"), 16
    ),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "dim_ff", "ffn_hidden_size", "d_ff"), 96),
    **dict.fromkeys(
        ("intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size", "shared_expert_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), LONGEST),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", "decoder_start_token_id"), 1),
    "index_n_heads": 4,
    "num_attention_groups": 2,
    "mamba_num_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWS = {"sliding_window": WINDOW, "attention_chunk_size": WINDOW, "window_size": WINDOW, "attention_window_size": WINDOW}
_LONG_ROPE = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]
#: Ways to scale rotary positions, past the length that they were trained for.
SCALINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 8.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": _LONG_ROPE,
        "factor": LONGEST / TRAINED,
        "original_max_position_embeddings": TRAINED,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
}


@dataclass(frozen=True)
class Regime:
    """Something that a family computes only past a length or beside plain attention.

    Attributes:
        name: of it, as the table of ``docs/engine.md`` has it.
        off: settings of the configuration that switch it off; ``"sinks"`` are parameters, and are switched off there.
    """

    name: str
    off: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Case:
    """A family past its regimes.

    Attributes:
        name: ``model_type``, or ``model_type+scaling``.
        model_type: of transformers.
        settings: of the configuration.
        regimes: what a row of ``LENGTH`` tokens comes to.
    """

    name: str
    model_type: str
    settings: dict[str, Any] = field(hash=False)
    regimes: tuple[Regime, ...] = ()

    def config(self, **others: Any) -> Any:
        """The configuration, with other settings where given."""
        return _config_class(self.model_type)(**copy.deepcopy(self.settings | others))


class NotCovered(Exception):
    """The case shows nothing here, and why."""


@dataclass(frozen=True)
class Made:
    """A case's model, which is to be left as it is, and what its untouched forward says.

    Attributes:
        case: of it.
        model: float32, in evaluation mode.
        scale: of the random weights.
        effects: by regime, the largest change of a log-probability in nats where it is switched off.
        noise: largest distance of its float32 log-probabilities from those of float64.
    """

    case: Case
    model: Any
    scale: float
    effects: dict[str, float]
    noise: float

    def on(self, device: str) -> Made:
        """The same on a device, where the same operations round in another way."""
        return self if device == "cpu" else dataclasses.replace(self, model=copy.deepcopy(self.model).to(device))

    @property
    def limit(self) -> float:
        """Nats that log-probabilities of the same computation in another order may be apart."""
        return 1e-4 if self.model.device.type == "cpu" else 1e-3

    def untouched(self) -> Any:
        """A model of its own for whoever changes models: same class, configuration and weights."""
        return copy.deepcopy(self.model)


def row(length: int = LENGTH, seed: int = 0) -> list[int]:
    """Ordinary tokens."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ORDINARY, VOCABULARY, (length,), generator=drawn).tolist()


@torch.inference_mode()
def plain_logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """``[L, V]`` log-probabilities of the token after each, by the model's own forward of one row without a cache.

    A copy computes them: rotary positions that grow with the length of a row stay grown for the rows after it.
    """
    logits = copy.deepcopy(model)(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
    return (logits.double() / temperature).log_softmax(-1).cpu()


def case(name: str) -> Case:
    """A case by name.

    Raises:
        NotCovered: transformers cannot build it tiny.
    """
    model_type, _, kind = name.partition("+")
    try:
        found = _case(model_type)
        found = _scaled(found, kind) if kind else found
        return _with_sinks(found, _parameters(found))
    except NotCovered:
        raise
    except Exception as error:  # whatever a configuration says of sizes that do not fit it
        raise NotCovered(f"{type(error).__name__}: {str(error).splitlines()[0][:120]}") from error


def cases() -> dict[str, Case]:
    """All cases, by name; see ``not_built`` for families that are none."""
    return dict(_cases()[0])


def not_built() -> dict[str, str]:
    """Causal families of transformers that no case is made of, and why."""
    return dict(_cases()[1])


#: The cases of CI: the Llama family, biases by position, positions that begin at another number than 0, and each kind of window, chunk, sink, cap and scaling.
QUICK = (
    "llama",
    "gpt2",
    "bloom",
    "camembert",
    "mistral",
    "qwen2",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "gpt_oss",
    "llama4_text",
    "phi3+longrope",
    "llama+dynamic",
    "qwen3_moe",
    "mamba",
)


@functools.cache
def made(name: str) -> Made:
    """The model of a case, its weights scaled until every regime matters.

    Raises:
        NotCovered: at no scale does every regime matter while float32 is exact enough to tell.
    """
    wanted, said = case(name), "it has no finite log-probabilities"
    for scale in _SCALES:
        try:
            model = _built(wanted, scale)
            expected = plain_logprobs(model, tokens := row())
        except Exception as error:  # a foreign forward may raise anything
            raise NotCovered(f"its own forward fails: {type(error).__name__}: {str(error).splitlines()[0][:120]}") from error
        if not torch.isfinite(expected).all():
            continue
        effects = {r.name: _distance(plain_logprobs(_switched_off(wanted, r, model), tokens), expected) for r in wanted.regimes}
        try:
            noise = _distance(plain_logprobs(_in_double(model), tokens), expected)
        except Exception as error:  # parts of it take no float64
            raise NotCovered(f"its own forward fails in float64: {type(error).__name__}") from error
        weakest = min(effects, key=effects.__getitem__, default=None)
        if noise > 2e-5:
            said = f"float32 is off by {noise:.1e} nats at scale {scale:g}"
        elif weakest is not None and effects[weakest] < MATTERS:
            said = f"without {weakest} log-probabilities change by {effects[weakest]:.3f} nats at most"
        else:
            return Made(wanted, model, scale, effects, noise)
    raise NotCovered(said)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _in_double(model: Any) -> Any:
    model = copy.deepcopy(model).double()
    if getattr(model.config, "_experts_implementation", None) is not None:  # the grouped product takes no float64
        model.set_experts_implementation("eager")
    return model


def _model_class(model_type: str) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _built(case: Case, scale: float) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = _model_class(case.model_type)(case.config()).eval().float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "sink" in name:
                    parameter.normal_(1.0, 1.0)
                elif parameter.dim() > 1:
                    parameter.mul_(scale)
                elif parameter.std() == 0:  # as new: 0 or 1, of which a mistake would not be seen
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.requires_grad_(True)
    return model


def _switched_off(case: Case, regime: Regime, model: Any) -> Any:
    other = type(model)(case.config(**regime.off)).eval()
    other.load_state_dict(model.state_dict())
    if regime.name == "sinks":
        for name, parameter in other.named_parameters():
            if "sink" in name:
                nn.init.constant_(parameter, -1e4)
    return other


# ------------------------------------------------------------------ which cases there are


def _config_class(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


_MLA = ("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text", "glm4_moe_lite")
_FULL_AND_SLIDING = ["sliding_attention", "full_attention"] * 2
_SLIDES = {"layer_types": _FULL_AND_SLIDING, "use_sliding_window": True, "sliding_window": WINDOW}
#: What the sizes above leave to be said of a family.
_SPECIAL: dict[str, dict[str, Any]] = {
    **{
        name: {"num_key_value_heads": 4}
        for name in (*_MLA, "glm_moe_dsa", "minicpm3", "youtu", "qwen4_exp_text", "longcat_flash")
    },
    **{name: _SLIDES for name in ("qwen2", "qwen2_moe", "qwen3", "smollm3", "dots1", "laguna", "mellum")},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    "starcoder2": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": {"sliding_window": WINDOW},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "ctrl": {"dff": 96},
    "longcat_flash": {"num_key_value_heads": 4, "zero_expert_num": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
    "gemma3n_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0},
    "llama4_text": {"attn_scale": 0.5, "floor_scale": 32},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16, "pronunciation_embed_dim": 16, "shape_embed_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
#: Families that see or hear: what a row of text comes to in them is covered by their text part, which is a family of its own.
_COMPOSITE = "it reads more than text; its text model is a family of its own, or takes no text alone"


@functools.cache
def _cases() -> tuple[dict[str, Case], dict[str, str]]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, Case] = {}
    missing: dict[str, str] = {}
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            found[model_type] = case(model_type)
        except NotCovered as reason:
            missing[model_type] = str(reason)
            continue
        for kind in _scalings(found[model_type]):
            with contextlib.suppress(NotCovered):  # the family takes no such scaling
                found[f"{model_type}+{kind}"] = case(f"{model_type}+{kind}")
    return found, missing


def _parameters(case: Case) -> list[str]:
    """Names of a model's parameters, none of which is made."""
    config = case.config()
    if config.get_text_config() is not config:
        raise NotCovered(_COMPOSITE)
    with torch.device("meta"):
        model = _model_class(case.model_type)(config)
    if (size := sum(p.numel() for p in model.parameters())) > 5_000_000:
        raise NotCovered(f"its smallest form has {size:,} parameters")
    return [name for name, _ in model.named_parameters()]


def _with_sinks(case: Case, parameters: list[str]) -> Case:
    sinks = (Regime("sinks"),) if any("sink" in name for name in parameters) else ()
    return dataclasses.replace(case, regimes=(*case.regimes, *sinks))


def _case(model_type: str) -> Case:
    config_class = _config_class(model_type)
    default = config_class()
    names = {*vars(default), *getattr(config_class, "__dataclass_fields__", {})}
    names -= {name for name in names if isinstance(getattr(config_class, name, None), property)}
    names -= getattr(config_class, "attribute_map", {}).keys()
    settings = {name: value for name, value in (_SIZES | _WINDOWS).items() if name in names}
    if "is_decoder" in names:
        settings["is_decoder"] = True
    if getattr(default, "layer_types", None) and "layer_types" in names:
        settings["layer_types"] = (list(dict.fromkeys(default.layer_types)) * 4)[:4]
    for name, value in (("attn_logit_softcapping", 2.0), ("final_logit_softcapping", 5.0)):
        if getattr(default, name, None):
            settings[name] = value
    settings |= _SPECIAL.get(model_type, {})
    config = config_class(**copy.deepcopy(settings))
    return Case(model_type, model_type, settings, tuple(_regimes(config, settings)))


def _regimes(config: Any, settings: dict[str, Any]) -> list[Regime]:
    found = []
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention", "chunked_attention", "local"])
    for name, kind in (("sliding_window", "sliding"), ("attention_chunk_size", "chunked"), ("window_size", "local")):
        if settings.get(name) and getattr(config, name, None) and any(kind in each for each in kinds):
            found.append(
                Regime({"sliding_window": "window", "attention_chunk_size": "chunk"}.get(name, name), {name: 8 * LONGEST})
            )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if settings.get(name):
            found.append(Regime(name.replace("_logit_softcapping", " cap"), {name: 1e6}))
    if settings.get("floor_scale"):
        found.append(Regime("attention temperature", {"attn_temperature_tuning": False}))
    return found


def _scalings(case: Case) -> list[str]:
    rope = getattr(case.config(), "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") != "default":
        return []
    return list(SCALINGS) if case.model_type == "llama" else ["dynamic", "longrope"]


def _scaled(case: Case, kind: str) -> Case:
    default = dict(case.config().rope_parameters)
    scaling = default | SCALINGS[kind]
    if kind == "longrope":
        half = int(case.settings.get("qk_rope_head_dim", 16) * default.get("partial_rotary_factor", 1.0)) // 2
        scaling |= {"short_factor": [1.0] * half, "long_factor": _LONG_ROPE[:half]}
    lengths = {"original_max_position_embeddings": TRAINED} if "original_max_position_embeddings" in vars(case.config()) else {}
    if kind == "dynamic":  # it goes by the longest position
        lengths = {"max_position_embeddings": TRAINED}
    off: dict[str, Any] = {"rope_parameters": default}
    if kind in ("dynamic", "longrope"):  # the same, and never past it
        scaling_off = scaling | ({"original_max_position_embeddings": LONGEST} if kind == "longrope" else {})
        off = {"rope_parameters": scaling_off} | dict.fromkeys(lengths, LONGEST)
    settings = case.settings | {"rope_parameters": scaling} | lengths
    return Case(f"{case.name}+{kind}", case.model_type, settings, (*case.regimes, Regime(f"{kind} positions", off)))
