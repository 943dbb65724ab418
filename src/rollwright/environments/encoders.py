"""Text encoders: a directory of a Hugging Face model that maps a text to a vector of length 1.

How a text becomes a vector is part of the encoder: the prefix of queries and of passages, and how token vectors are pooled. A style
names these for a family of encoders. A directory that states another pooling (sentence-transformers' ``1_Pooling/config.json``) is an
error, because vectors of the wrong pooling look right and retrieve badly.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollwright.environments.corpus import file_digest
from rollwright.errors import ConfigError

#: Style -> pooling, query prefix, passage prefix.
STYLES = {
    "e5": ("mean", "query: ", "passage: "),
    "bge": ("cls", "Represent this sentence for searching relevant passages: ", ""),
    "plain": ("mean", "", ""),
}
#: Tokens of one batch of passages, padding included.
_BATCH_TOKENS = 16_384
#: Number of recent queries whose vectors are kept; the samples of a group often search for the same words.
_RECENT_QUERIES = 4096
#: Files that determine the vectors.
_FILES = ("*.json", "*.safetensors", "*.bin", "*.txt", "*.model")


@dataclass(frozen=True)
class EncoderSettings:
    """An encoder directory and how texts become vectors. See ``encoder_settings``."""

    directory: Path
    pooling: str
    query_prefix: str
    passage_prefix: str
    max_tokens: int


def encoder_settings(
    directory: str | Path,
    style: str | None = None,
    pooling: str | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    max_tokens: int = 256,
) -> EncoderSettings:
    """Complete an encoder's settings from a style, and check them against the directory.

    Args:
        directory: Hugging Face model directory: ``config.json``, weights, tokenizer.
        style: a key of ``STYLES``, which gives the values that are None.
        pooling: ``"mean"`` of the token vectors, or that of the first (``"cls"``) or the ``"last"`` token.
        query_prefix: text before each query.
        passage_prefix: text before each passage.
        max_tokens: longer texts are cut.

    Raises:
        ConfigError: there is no such directory, a setting is unknown or missing, or the directory states another pooling.
    """
    folder = Path(directory)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"There is no encoder in {folder}: it has no config.json. Give the directory of a Hugging Face model, for example after "
            "`hf download intfloat/e5-base-v2 --local-dir e5`."
        )
    if style is not None and style not in STYLES:
        raise ConfigError(f"The encoder style {style!r} is unknown; known are {', '.join(STYLES)}.")
    given = [pooling, query_prefix, passage_prefix]
    defaults = STYLES[style] if style is not None else (None, None, None)
    values = [default if value is None else value for value, default in zip(given, defaults, strict=True)]
    missing = [name for name, value in zip(("pooling", "query_prefix", "passage_prefix"), values, strict=True) if value is None]
    if missing:
        raise ConfigError(
            f"It is not known how {folder} turns a text into a vector: {', '.join(missing)}. Name a style ({', '.join(STYLES)}), or "
            "give each of these."
        )
    pool, query, passage = (str(value) for value in values)
    if pool not in _POOL:
        raise ConfigError(f"The pooling {pool!r} is unknown; known are {', '.join(_POOL)}.")
    if max_tokens < 2:
        raise ConfigError(f"max_tokens is {max_tokens}; an encoder needs at least 2.")
    _check_sentence_transformers(folder, pool)
    return EncoderSettings(folder, pool, query, passage, max_tokens)


def named_encoder(
    directory: str | Path | None,
    style: str | None = None,
    pooling: str | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    max_tokens: int | None = None,
) -> EncoderSettings | None:
    """Return the settings of an encoder, or None without a directory. Settings without a directory are a ``ConfigError``."""
    settings = {
        "style": style,
        "pooling": pooling,
        "query_prefix": query_prefix,
        "passage_prefix": passage_prefix,
        "max_tokens": max_tokens,
    }
    if directory is not None:
        return encoder_settings(directory, **{name: value for name, value in settings.items() if value is not None})
    if given := [name for name, value in settings.items() if value is not None]:
        raise ConfigError(f"Without an encoder, nothing reads {', '.join(given)}: name the encoder's directory.")
    return None


def _check_sentence_transformers(folder: Path, pooling: str) -> None:
    """Refuse a directory of sentence-transformers whose files state another pooling, or further layers."""
    declared = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
    stated = _json(folder / "1_Pooling" / "config.json")
    on = [declared.get(key, key) for key, value in stated.items() if key.startswith("pooling_mode_") and value is True]
    if stated.get("pooling_mode") is not None:
        on.append({"lasttoken": "last"}.get(stated["pooling_mode"], stated["pooling_mode"]))
    if on and on != [pooling]:
        raise ConfigError(
            f"The pooling is {pooling!r}, but {folder}/1_Pooling/config.json says {', '.join(map(repr, on))}. Name that pooling"
            + (f"; known are {', '.join(_POOL)}." if set(on) - set(_POOL) else ".")
        )
    modules = _json(folder / "modules.json")
    known = ("Transformer", "Pooling", "Normalize")
    if others := [m["type"] for m in modules if m["type"].rpartition(".")[2] not in known] if isinstance(modules, list) else []:
        raise ConfigError(
            f"The encoder {folder} ends with {', '.join(others)} (modules.json), which is not supported. Use an encoder of a "
            "transformer and a pooling."
        )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}). Download the encoder again.") from None


def encoder_digest(directory: Path) -> str:
    """Compute a hash of an encoder's config, tokenizer and weights (96 bits, hexadecimal)."""
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted({path for pattern in _FILES for path in directory.glob(pattern)}):
        digest.update(f"{path.name} {file_digest(path)}\n".encode())
    return digest.hexdigest()


class Encoder:
    """A loaded encoder. Safe to use from several threads.

    Args:
        settings: the directory and how texts become vectors.
        device: ``"auto"`` uses a GPU if there is one.

    Raises:
        ConfigError: the directory cannot be loaded, or its model takes fewer than ``max_tokens``.
    """

    def __init__(self, settings: EncoderSettings, device: str = "auto") -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(settings.directory, local_files_only=True)
            model, loading = AutoModel.from_pretrained(
                settings.directory, local_files_only=True, dtype=torch.float32, output_loading_info=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"The encoder {settings.directory} cannot be loaded: {error}") from error
        if missing := sorted(key for key in loading["missing_keys"] if not key.startswith("pooler.")):  # the pooler is not used
            raise ConfigError(
                f"The weights of {settings.directory} lack {len(missing)} tensors of the model, such as {missing[0]}. Download the "
                "encoder again."
            )
        if model.config.is_encoder_decoder:
            raise ConfigError(
                f"{settings.directory} is an encoder-decoder model. Give an encoder that has one stack of layers."
            )
        limit = getattr(model.config, "max_position_embeddings", None)
        if isinstance(limit, int) and settings.max_tokens > limit:
            raise ConfigError(
                f"max_tokens is {settings.max_tokens}, but {settings.directory} takes at most {limit}. Lower max_tokens."
            )
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.settings = settings
        self.dimensions: int = model.config.hidden_size
        self._device = torch.device(device)
        self._model = model.to(self._device).eval()
        self._tokenizing = threading.Lock()  # a fast tokenizer's truncation is state that two threads may not change at once
        self.query = functools.lru_cache(_RECENT_QUERIES)(self._query)

    def _query(self, text: str) -> np.ndarray:
        """Return the vector of a query, ``[D]`` float32.

        Queries are encoded one at a time: in a batch, the last bits of a vector depend on its neighbours, and so might the order of
        rows with almost equal scores.
        """
        [ids] = self._tokens([self.settings.query_prefix + text])
        return self._vectors([ids])[0]

    def passages(self, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Encode texts in batches of similar length.

        Yields:
            Positions in ``texts``, ``[K]`` int, and their vectors, ``[K, D]`` float32.
        """
        tokens = self._tokens([self.settings.passage_prefix + text for text in texts])
        order = sorted(range(len(texts)), key=lambda row: len(tokens[row]))
        while order:
            size = 1
            while size < len(order) and (size + 1) * max(1, len(tokens[order[-1]])) <= _BATCH_TOKENS:
                size += 1
            rows, order = order[-size:], order[:-size]
            yield np.asarray(rows), self._vectors([tokens[row] for row in rows])

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        with self._tokenizing:
            return self._tokenizer(texts, truncation=True, max_length=self.settings.max_tokens)["input_ids"]

    def _vectors(self, tokens: list[list[int]]) -> np.ndarray:
        """Encode ``K`` token lists. Returns ``[K, D]`` float32; the vector of an empty list is 0."""
        import torch

        length = max(1, *(len(ids) for ids in tokens))
        ids_KL = torch.zeros(len(tokens), length, dtype=torch.long)
        mask_KL = torch.zeros(len(tokens), length, dtype=torch.long)
        for row, ids in enumerate(tokens):
            ids_KL[row, : len(ids)] = torch.tensor(ids, dtype=torch.long)
            mask_KL[row, : len(ids)] = 1
        ids_KL, mask_KL = ids_KL.to(self._device), mask_KL.to(self._device)
        with torch.inference_mode():
            hidden_KLD = self._model(input_ids=ids_KL, attention_mask=mask_KL).last_hidden_state
            pooled_KD = _POOL[self.settings.pooling](hidden_KLD, mask_KL) * (mask_KL.sum(1, keepdim=True) > 0)
            return torch.nn.functional.normalize(pooled_KD, dim=-1).cpu().numpy()


def _mean(hidden_KLD: Any, mask_KL: Any) -> Any:
    return (hidden_KLD * mask_KL[..., None]).sum(1) / mask_KL.sum(1, keepdim=True).clamp(min=1)


def _last(hidden_KLD: Any, mask_KL: Any) -> Any:
    return hidden_KLD[range(len(hidden_KLD)), (mask_KL.sum(1) - 1).clamp(min=0)]


#: Pooling -> the pooled vectors ``[K, D]`` of token vectors ``[K, L, D]`` and their mask ``[K, L]``.
_POOL = {"mean": _mean, "cls": lambda hidden_KLD, mask_KL: hidden_KLD[:, 0], "last": _last}
