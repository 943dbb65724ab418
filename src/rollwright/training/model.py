"""Loading Hugging Face models, and making small new ones (text, or text and images)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollwright.config.experiment import NewVisionConfig
from rollwright.config.sections import TrainEngineConfig
from rollwright.data.vision import IMAGE, VIDEO, VISION_END, VISION_PIECES, VISION_START, new_image_processor
from rollwright.errors import ConfigError
from rollwright.inference.model_facts import attention_arguments, note_attention
from rollwright.inference.weights.adapter import is_adapter
from rollwright.tracking.progress import without_progress_bars
from rollwright.training.hf_checkpoint import save_model
from rollwright.training.tree_attention import recomputed_alike

#: Architectures that ``new_model`` makes: name -> configuration class of transformers.
ARCHITECTURES = {"qwen3": "Qwen3Config", "qwen2": "Qwen2Config", "llama": "LlamaConfig"}

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """Return the device that a config names. ``auto`` is the local rank's GPU if there is one, otherwise the CPU."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the compute type that a config names. ``auto`` is bfloat16 on a GPU that supports it, otherwise float32."""
    if name == "auto":
        has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if has_bfloat16 else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}: choose one of auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def load_model(config: TrainEngineConfig, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> nn.Module:
    """Load a causal language model, or an image-and-text model if the architecture is one.

    Args:
        config: section of the model.
        dtype: type of the parameters. If None, that of ``held_dtype``.
        device: device of the model. If None, the device of ``config``.

    Returns:
        The model in evaluation mode with dropout disabled, so that training and scoring compute the same log-probabilities.

    Raises:
        ConfigError: there is no model at ``config.path``, or it needs code that ``trust_remote_code`` does not allow.
    """
    device = device or resolve_device(config.device)
    return _made(config, dtype or held_dtype(config, device)).to(device).eval()


def empty_model(config: TrainEngineConfig, dtype: torch.dtype) -> nn.Module:
    """Make a config's model without weights: its parameters are on the meta device and take no memory, and its buffers are computed.

    Raises:
        ConfigError: see ``load_model``.
    """
    return _made(config, dtype, is_empty=True).eval()


def empty_copy(model: Any, dtype: torch.dtype) -> nn.Module:
    """Make a model of the same architecture without weights (see ``empty_model``), and copy the buffers."""
    with _parameters_without_memory(), without_progress_bars():
        copied = _auto_class(model.config).from_config(copy.deepcopy(model.config), dtype=dtype)
    _switch_off_dropout(copied)
    values = dict(model.named_buffers())
    for name, buffer in copied.named_buffers():
        buffer.data = values[name].clone()
    return copied.eval()


def frozen_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model with frozen parameters of type ``dtype``, without an intermediate copy in the old type. Buffers keep their type."""
    copies: dict[int, Any] = {id(p): nn.Parameter(p.detach().to(dtype, copy=True), False) for p in model.parameters()}
    return copy.deepcopy(model, copies)


def held_dtype(config: TrainEngineConfig, device: torch.device) -> torch.dtype:
    """Return the type of a model's parameters: float32 if an optimizer changes them (master weights), otherwise the compute type.

    The base of an adapter does not change.
    """
    is_trained = config.optimizer is not None and config.lora is None
    return torch.float32 if is_trained else resolve_dtype(config.dtype, device)


def _made(config: TrainEngineConfig, dtype: torch.dtype, *, is_empty: bool = False) -> nn.Module:
    import transformers

    if not config.path:
        raise ConfigError("The model's path is empty: set it to a model directory or a Hugging Face name.")
    if is_adapter(config.path):
        raise ConfigError(
            f"{config.path} is a LoRA adapter without its base: merge the two (`rollwright export {config.path} DIRECTORY`) and name the "
            "result as the model's path."
        )
    arguments: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    try:
        model_config = transformers.AutoConfig.from_pretrained(config.path, **arguments)
        if config.lora is not None and getattr(model_config, "quantization_config", None) is not None:
            raise ConfigError(
                f"{config.path} holds quantised weights, and lora is set: adapters are trained over weights in float32 or bfloat16 "
                "(QLoRA is not built). Name a checkpoint that is not quantised."
            )
        arguments |= {"dtype": dtype, **attention_arguments(config.attn_implementation)}
        builder = _auto_class(model_config)
        with without_progress_bars(), _parameters_without_memory() if is_empty else nullcontext():
            if is_empty or config.init_from_scratch:
                model = builder.from_config(model_config, **arguments)
            else:
                model = builder.from_pretrained(config.path, config=model_config, **arguments)
    except (OSError, ValueError) as error:
        raise ConfigError(f"No model could be loaded from {config.path!r}: {error}") from error
    note_attention(model, config.attn_implementation)
    _switch_off_dropout(model)
    return model


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Register new parameters on the meta device inside the context. Buffers stay real, because constructors compute some of them."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def checkpoint_layers(model: nn.Module, layers: list[nn.Module], every: int) -> None:
    """Recompute the activations of every ``every``-th layer in the backward pass (in training mode)."""
    options = {"use_reentrant": False, "context_fn": recomputed_alike(model)}
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)  # type: ignore[operator]
    for number, layer in enumerate(layers):
        if (number + 1) % every:
            layer.gradient_checkpointing = False  # type: ignore[assignment]


def _auto_class(model_config: Any) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    has_remote_code = "AutoModelForCausalLM" in (getattr(model_config, "auto_map", None) or {})
    if type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING or has_remote_code:
        return transformers.AutoModelForCausalLM
    if type(model_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    raise ConfigError(
        f"A model of type {model_config.model_type!r} is neither a causal language model nor one of images and text."
    )


def _switch_off_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def new_model(
    directory: str | Path,
    architecture: str = "qwen3",
    *,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    hidden_size: int = 128,
    intermediate_size: int | None = None,
    num_hidden_layers: int = 4,
    num_attention_heads: int = 4,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    max_position_embeddings: int = 512,
    tie_word_embeddings: bool = True,
    seed: int = 1,
    **config_overrides: Any,
) -> nn.Module:
    """Make a model with random weights and write it as a Hugging Face checkpoint.

    Args:
        directory: receives ``config.json``, ``generation_config.json``, ``model.safetensors`` and the tokenizer's files, if given.
        architecture: ``qwen3``, ``qwen2`` or ``llama``.
        tokenizer: sets the vocabulary size and the ids of the begin, end and padding tokens.
        vocab_size: vocabulary size, at least that of the tokenizer. If None, the tokenizer's. Required without a tokenizer.
        hidden_size: width of the model.
        intermediate_size: width of the feed-forward layers. If None, three times ``hidden_size``, rounded up to a multiple of 32.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads. If None, equal to the number of query heads.
        head_dim: size of a head. If None, ``hidden_size / num_attention_heads``.
        max_position_embeddings: longest sequence.
        tie_word_embeddings: use one matrix for input and output embeddings.
        seed: seed of the weights. Global random states are not changed.
        **config_overrides: further keys of the architecture's configuration.

    Returns:
        The model, float32 on the CPU.

    Raises:
        ConfigError: the architecture is unknown, or sizes are inconsistent.
    """
    import transformers

    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture is {architecture!r}: choose one of {', '.join(ARCHITECTURES)}.")
    if vocab_size is None:
        if tokenizer is None:
            raise ConfigError("new_model needs a tokenizer or a vocab_size.")
        vocab_size = len(tokenizer)
    elif tokenizer is not None and vocab_size < len(tokenizer):
        raise ConfigError(f"vocab_size is {vocab_size}, but the tokenizer has {len(tokenizer)} tokens.")
    if head_dim is None:
        if hidden_size % num_attention_heads:
            raise ConfigError(
                f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_attention_heads}; give head_dim."
            )
        head_dim = hidden_size // num_attention_heads
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    model_config = getattr(transformers, ARCHITECTURES[architecture])(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or 32 * math.ceil(3 * hidden_size / 32),
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads or num_attention_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        **ids,
        **config_overrides,
    )
    return _write_new(transformers.AutoModelForCausalLM, model_config, directory, seed, tokenizer=tokenizer)


def _write_new(auto_class: Any, model_config: Any, directory: str | Path, seed: int, **processors: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(model_config, dtype=torch.float32).eval()
    save_model(model, directory, **processors)
    return model


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters; tied parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def new_vision_model(
    directory: str | Path,
    *,
    tokenizer: Any,
    vision: NewVisionConfig | None = None,
    hidden_size: int = 128,
    intermediate_size: int | None = None,
    num_hidden_layers: int = 4,
    num_attention_heads: int = 4,
    num_key_value_heads: int | None = None,
    max_position_embeddings: int = 512,
    tie_word_embeddings: bool = True,
    seed: int = 1,
) -> nn.Module:
    """Make a Qwen2-VL model with random weights and write it with its tokenizer and image processor.

    Args:
        directory: receives model, tokenizer and ``preprocessor_config.json``.
        tokenizer: tokenizer whose vocabulary includes the image tokens (``rollwright.data.vision.VISION_PIECES``).
        vision: config of the vision tower. If None, the defaults.
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
        max_position_embeddings, tie_word_embeddings, seed: see ``new_model``; they apply to the language model.

    Returns:
        The model, float32 on the CPU.

    Raises:
        ConfigError: the tokenizer has no image tokens, or sizes are inconsistent.
    """
    import transformers

    vision = vision or NewVisionConfig()
    ids = {piece: tokenizer.convert_tokens_to_ids(piece) for piece in VISION_PIECES}
    if missing := [piece for piece, number in ids.items() if number in (None, tokenizer.unk_token_id)]:
        raise ConfigError(f"the tokenizer has no token {missing[0]!r}; add {', '.join(VISION_PIECES)} to its pieces.")
    for width, heads, name in ((hidden_size, num_attention_heads, "heads"), (vision.hidden_size, vision.heads, "vision.heads")):
        if width % heads or (width // heads) % 4:
            raise ConfigError(f"{name}={heads} does not divide the width {width} into heads of a multiple of 4; change one.")
    half = hidden_size // num_attention_heads // 2
    sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]  # time, height, width, in the proportions of Qwen2-VL
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size or 32 * math.ceil(3 * hidden_size / 32),
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads or num_attention_heads,
            "max_position_embeddings": max_position_embeddings,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections},
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": tie_word_embeddings,
        },
        vision_config={
            "depth": vision.layers,
            "embed_dim": vision.hidden_size,
            "hidden_size": hidden_size,
            "num_heads": vision.heads,
            "patch_size": vision.patch_size,
            "spatial_merge_size": vision.merge_size,
        },
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=tie_word_embeddings,
    )
    token_pixels = (vision.patch_size * vision.merge_size) ** 2
    processor = new_image_processor(vision.patch_size, vision.merge_size, token_pixels, vision.max_tokens * token_pixels)
    processors = {"tokenizer": tokenizer, "image_processor": processor}
    return _write_new(transformers.AutoModelForImageTextToText, config, directory, seed, **processors)
