"""Loads tokenizers so that their chat templates return ids, and builds small tokenizers in Hugging Face format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rollwright.config.generation import returning_ids
from rollwright.data.rows import unreachable_hub
from rollwright.errors import ConfigError, DataError

PAD, END, UNKNOWN = "<pad>", "<|end|>", "<unk>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

#: One line: each message is its role's token, its text and the end token; the generation prompt is the assistant's token.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + (message['role'] if message['role'] in ['system', 'assistant'] else 'user') + '|>' "
    "+ (message['content'] or '') + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

_NO_TOOLS = (
    "{%- if tools -%}{{- raise_exception('This chat template cannot offer tools: the endpoint is sent messages only. "
    "Evaluate a model directory instead.') -}}{%- endif -%}"
)

#: Printable ASCII and the newline.
ASCII = "".join(chr(code) for code in range(32, 127)) + "\n"


def load_tokenizer(path: str | Path | Any, trust_remote_code: bool = False) -> Any:
    """Load a Hugging Face tokenizer by directory or name.

    Args:
        path: directory or name; a tokenizer object is prepared and returned.
        trust_remote_code: run code that comes with the tokenizer.

    Returns:
        The tokenizer, with ``apply_chat_template(tokenize=True) -> list[int]`` and a pad token (by default, the end token).

    Raises:
        ConfigError: there is no tokenizer at ``path``, or it has neither a pad nor an end token.
    """
    if not isinstance(path, (str, Path)):
        return _prepared(path, "the tokenizer given")
    if not str(path):
        raise ConfigError("no tokenizer is named: set tokenizer_path (or actor.path) to a directory or a Hugging Face name.")
    from transformers import AutoTokenizer

    # Without a network, the library retries each file for half a minute, with five warnings, before it uses its cache.
    unreachable = "" if Path(path).expanduser().exists() else unreachable_hub()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, local_files_only=bool(unreachable)
        )
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"the tokenizer {path} comes with code of its own; set trust_remote_code: true if you trust it."
            ) from error
        there = "the directory exists" if Path(path).is_dir() else "no such directory here"
        cause = f"{unreachable}, and its cache has none" if unreachable else " ".join(str(error).split())[:200]
        raise ConfigError(f"cannot load a tokenizer from {path} ({there}): {cause}") from error
    return _prepared(tokenizer, str(path))


def _prepared(tokenizer: Any, name: str) -> Any:
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a multi-modal processor holds its tokenizer
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"{name} has neither a pad nor an end token; set tokenizer.pad_token before handing it over.")
        tokenizer.pad_token = tokenizer.eos_token
    return returning_ids(tokenizer)


def build_character_tokenizer(
    characters: str | Iterable[str] = ASCII,
    path: str | Path | None = None,
    pieces: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> Any:
    """Make a tokenizer in which every character is a token.

    Args:
        characters: the characters, in the order of their ids; repeated ones count once.
        path: directory to save it to in Hugging Face format (``tokenizer.json``, chat template). If None, it is not saved.
        pieces: strings of several characters that are one token each, such as ``"<answer>"``; the longest match wins.
        chat_template: Jinja template; the default knows the roles system, user and assistant.

    Returns:
        A fast tokenizer; ``load_tokenizer(path)`` and ``AutoTokenizer.from_pretrained(path)`` load an equal one. Ids 0 to 5 are
        pad, unknown, end and the three roles. Text of known characters survives encoding and decoding unchanged.

    Raises:
        DataError: an entry of ``characters`` is not one character, or a piece is too short or a special token.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = list(dict.fromkeys(characters))
    pieces = list(dict.fromkeys(pieces))
    special = [PAD, UNKNOWN, END, *ROLES]
    if wrong := [character for character in characters if len(character) != 1]:
        raise DataError(f"build_character_tokenizer: {wrong[0]!r} is not one character; give longer strings as pieces.")
    if wrong := [piece for piece in pieces if len(piece) < 2 or piece in special]:
        raise DataError(f"build_character_tokenizer: the piece {wrong[0]!r} is a single character or a special token.")
    vocabulary = {token: index for index, token in enumerate([*special, *characters, *pieces])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    longest_first = sorted(pieces, key=len, reverse=True)
    pattern = "|".join([*(re.escape(piece) for piece in longest_first), r"[\s\S]"])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return _finished(backend, path, chat_template)


def build_bpe_tokenizer(
    texts: Iterable[str],
    tokens: int,
    path: str | Path | None = None,
    pieces: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> Any:
    """Train a byte-level BPE tokenizer, as GPT-2 and Qwen have one: every text survives encoding and decoding unchanged.

    Args:
        texts: texts to train on, such as prompts. Special tokens have no place in them.
        tokens: vocabulary size, including 256 bytes and 6 special tokens. The result is smaller if the texts run out of pairs to merge.
        path: directory to save it to. If None, it is not saved.
        pieces: strings that are one token each, wherever they are.
        chat_template: Jinja template; the default knows the roles system, user and assistant.

    Returns:
        A fast tokenizer; see ``build_character_tokenizer``.

    Raises:
        DataError: there are no texts, or ``tokens`` is too small.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [PAD, UNKNOWN, END, *ROLES]
    texts = [text for text in texts if text]
    if not texts or tokens <= len(alphabet) + len(special):
        raise DataError(
            f"build_bpe_tokenizer: {len(texts)} texts and {tokens} tokens; give texts, and more than {len(alphabet) + len(special)} tokens."
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return _finished(backend, path, chat_template)


def build_byte_tokenizer(path: str | Path | None = None) -> Any:
    """Make a tokenizer in which every byte of UTF-8 is a token, for text from a model whose tokenizer is unknown.

    Its chat template refuses tools, which it could not show to the model. Arguments and result as for ``build_character_tokenizer``;
    every text survives encoding and decoding unchanged.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = [PAD, UNKNOWN, END, *ROLES]
    vocabulary = {token: index for index, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return _finished(backend, path, _NO_TOOLS + CHAT_TEMPLATE)


def _finished(backend: Any, path: str | Path | None, chat_template: str) -> Any:
    """Make a Hugging Face tokenizer of a ``tokenizers.Tokenizer``, and save it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    tokenizer.chat_template = chat_template
    if path is not None:
        tokenizer.save_pretrained(path)
    return returning_ids(tokenizer)


def build_word_tokenizer(
    words: Sequence[str], path: str | Path | None = None, characters: str = ASCII, chat_template: str = CHAT_TEMPLATE
) -> Any:
    """Make a tokenizer whose tokens are the given words or syllables, and single characters for everything else.

    The longest matching word is taken, from left to right and at any position; give words with their leading space if they
    should match only at the beginning of a word. Arguments and result as for ``build_character_tokenizer``.
    """
    single = [word for word in words if len(word) == 1]
    return build_character_tokenizer([*characters, *single], path, [w for w in words if len(w) > 1], chat_template)
