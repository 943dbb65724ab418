"""A model made from nothing: what a stage of kind ``model`` is told."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class NewVisionConfig:
    """The part of a new model that sees."""

    patch_size: int = field(default=14, metadata={"help": "Side of an image patch, in pixels.", "ge": 2})
    merge_size: int = field(default=2, metadata={"help": "Patches a side that become one token.", "ge": 1})
    layers: int = field(default=2, metadata={"help": "Transformer blocks over patches.", "ge": 1})
    hidden_size: int = field(default=64, metadata={"help": "Width of these blocks.", "ge": 8})
    heads: int = field(default=4, metadata={"help": "Attention heads of these blocks.", "ge": 1})
    max_tokens: int = field(default=64, metadata={"help": "Most tokens of an image; larger images are scaled down.", "ge": 1})


@dataclass
class NewModelConfig:
    """A model with random weights and a tokenizer, written in Hugging Face form."""

    path: str = field(default="", metadata={"help": "Directory to write it to."})
    architecture: str = field(
        default="qwen3", metadata={"help": "Transformer family.", "choices": ["qwen3", "qwen2", "llama", "qwen2_vl"]}
    )
    hidden_size: int = field(default=128, metadata={"help": "Width of the residual stream.", "ge": 8})
    layers: int = field(default=4, metadata={"help": "Transformer blocks.", "ge": 1})
    heads: int = field(default=4, metadata={"help": "Attention heads.", "ge": 1})
    kv_heads: int | None = field(default=None, metadata={"help": "Key-value heads; null: as many as heads.", "ge": 1})
    head_dim: int | None = field(default=None, metadata={"help": "Size of a head; null: hidden_size / heads.", "ge": 2})
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Width of the feed-forward; null: three times hidden_size.", "ge": 8}
    )
    tie_embeddings: bool = field(default=True, metadata={"help": "Input and output embeddings are one matrix."})
    max_position_embeddings: int = field(default=512, metadata={"help": "Longest sequence, in tokens.", "ge": 8})
    vocabulary_from: str = field(
        default="", metadata={"help": "Tokenizer directory or name that is taken over; empty: a character tokenizer is made."}
    )
    characters: str = field(default="", metadata={"help": "Characters of the tokenizer; empty: printable ASCII and newline."})
    pieces: list[str] = field(
        default_factory=list, metadata={"help": "Strings that are one token each, such as '<answer>' or syllables."}
    )
    vision: NewVisionConfig | None = field(
        default=None, metadata={"help": "The part that sees, of architecture qwen2_vl; null: its defaults."}
    )
    seed: int = field(default=1, metadata={"help": "Seed of the weights."})
