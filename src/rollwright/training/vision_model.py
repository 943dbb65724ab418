"""Small new models that see, of Qwen2-VL's shape, in ordinary Hugging Face form with their image processor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollwright.config.new_model import NewVisionConfig
from rollwright.data.vision import IMAGE, VIDEO, VISION_END, VISION_PIECES, VISION_START, new_image_processor
from rollwright.errors import ConfigError
from rollwright.training.saving import save_model


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
    """Make a Qwen2-VL with random weights; written with tokenizer and image processor.

    Args:
        directory: receives model, tokenizer and ``preprocessor_config.json``.
        tokenizer: has the image tokens (``rollwright.data.vision.VISION_PIECES``).
        vision: the part that sees; None: its defaults.
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
        max_position_embeddings, tie_word_embeddings, seed: of the part that reads and writes; as for ``new_model``.

    Returns:
        The model, float32 on the CPU.

    Raises:
        ConfigError: the tokenizer has no image tokens, or sizes do not fit.
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
    sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]  # time, height, width, as Qwen2-VL shares them out
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.eval()
    token_pixels = (vision.patch_size * vision.merge_size) ** 2
    processor = new_image_processor(vision.patch_size, vision.merge_size, token_pixels, vision.max_tokens * token_pixels)
    save_model(model, directory, tokenizer=tokenizer, image_processor=processor)
    return model
