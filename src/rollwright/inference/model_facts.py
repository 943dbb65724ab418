"""How a Hugging Face model computes, read from its configuration or found by a probe; shared by engine and trainer.

A *regime* is a range of row lengths in which a model computes in one way. Rows longer than a window lose their first tokens; rows longer
than ``original_max_position_embeddings`` may have other rotary frequencies. A check on short rows proves nothing about the next regime.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rollwright.errors import ConfigError, RollwrightError
from rollwright.tracking.logging import getLogger

logger = getLogger(__name__)


# ------------------------------------------------------------------ attention


def attention_arguments(wanted: str) -> dict[str, Any]:
    """Return arguments for ``from_pretrained`` and ``from_config``. ``sdpa`` lets transformers choose; it falls back to eager."""
    return {"attn_implementation": None if wanted == "sdpa" else wanted}


def note_attention(model: Any, wanted: str) -> None:
    """Log, once for each model class, that a model was loaded with a different attention implementation than ``wanted``."""
    if (found := attention_of(model.config)) != wanted:
        _note_once(type(model).__name__, wanted, found)


def attention_of(config: Any) -> str:
    """Return the attention implementation that a configuration selects; transformers keeps its name in a private attribute."""
    return str(config.get_text_config()._attn_implementation)


@functools.cache
def _note_once(name: str, wanted: str, found: str) -> None:
    logger.info("%s is computed with attn_implementation=%s: transformers has no %s for it.", name, found, wanted)


# ------------------------------------------------------------------ regimes

#: Configuration keys that hold a length at which a model's computation changes.
_LENGTH_KEYS = re.compile(
    r"^(sliding_window|window|attention_window|local_window|local_attention|chunk|attention_chunk|mamba_chunk)(_size)?(_len)?$"
    r"|^original_max_position_embeddings$|^floor_scale$|^index_topk$|^(sliding|attention)_window_size$"
)


def regime_lengths(config: Any) -> dict[str, int]:
    """Return the longest row of each regime but the last, keyed by the setting that defines it.

    The settings are windows, chunks, ``original_max_position_embeddings``, position scales, and ``max_position_embeddings`` if the
    rotary frequencies depend on the length. A superfluous setting is harmless: it costs one more check.

    Args:
        config: a Hugging Face model's config; its text config is read.
    """
    text = config.get_text_config()
    found = {name: length for name, key, length in _numbers(text.to_dict(), "") if _LENGTH_KEYS.match(key) and length > 1}
    if (limit := _frequency_limits(text)[1]) is not None:
        found["max_position_embeddings"] = limit
    return found


def _numbers(value: Any, path: str) -> Iterator[tuple[str, str, int]]:
    """Yield the path, key and value of each integer in nested dicts and lists."""
    key = path.rsplit(".", 1)[-1].split("[")[0]
    if isinstance(value, dict):
        for name, part in value.items():
            if not str(name).endswith("_config"):
                yield from _numbers(part, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _numbers(part, f"{path}[{index}]")
    elif isinstance(value, int) and not isinstance(value, bool):
        yield path, key, value


class Proofs:
    """The row length up to which a model has passed a check.

    Args:
        config: a Hugging Face model's config.
    """

    def __init__(self, config: Any) -> None:
        lengths = regime_lengths(config).values()
        # At a window's end, one token past it (the first to show a fault), and well past it.
        self._edges = sorted({edge for length in lengths for edge in (length, length + 1, length + max(8, length // 8))})
        self._passed = -1

    def is_due(self, longest: int) -> bool:
        """True if rows of ``longest`` tokens reach a regime that has not been checked."""
        return self._passed < 0 or bisect_left(self._edges, longest) > bisect_left(self._edges, self._passed)

    def passed(self, longest: int) -> None:
        """Record that rows of up to ``longest`` tokens passed."""
        self._passed = max(self._passed, longest)


# ------------------------------------------------------------------ rotary frequencies that depend on the length


def frequency_groups(config: Any, lengths: Sequence[int]) -> list[int]:
    """Return a group number for each row; only rows with the same number may share a forward pass.

    With ``rope_type: longrope`` (Phi-3, Phi-4) a model has two sets of rotary frequencies and applies the set of the *longest* row
    in a forward pass to all rows. A row needs the set of its own length.

    Args:
        config: a Hugging Face model's config.
        lengths: each row's highest position plus one.

    Raises:
        ConfigError: the frequencies depend continuously on the length of the forward pass (``rope_type: dynamic``) for a row this long.
    """
    limits, dynamic_limit = _frequency_limits(config.get_text_config())
    if dynamic_limit is not None and max(lengths, default=0) > dynamic_limit:
        raise ConfigError(
            f"The model has rope_type=dynamic (rope_parameters in its config.json) and a row of {max(lengths)} tokens, more than its "
            f"max_position_embeddings={dynamic_limit}: from there on its rotary frequencies depend on the other rows of "
            "a batch. Shorten the rows, or set another rope_type, such as yarn, in the model's configuration."
        )
    return [bisect_left(limits, length) for length in lengths]


def fixed_frequencies(config: Any) -> tuple[str, int] | None:
    """Return the ``rope_type`` and the row length up to which rotary frequencies are fixed, or None if they never change.

    In a longer row every token, even the first, has different frequencies. A forward pass over the finished row then gives tokens
    that were sampled below the limit different log-probabilities than the engine did.
    """
    limits, dynamic_limit = _frequency_limits(config.get_text_config())
    found = [("longrope", limit) for limit in limits]
    if dynamic_limit is not None:
        found.append(("dynamic", dynamic_limit))
    return min(found, key=lambda kind: kind[1], default=None)


def _frequency_limits(text_config: Any) -> tuple[list[int], int | None]:
    """Return the row lengths above which ``longrope`` changes frequencies, ascending, and the one above which ``dynamic`` does, or None."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    ropes = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]  # may differ by kind of layer
    limits = sorted({rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"})
    is_dynamic = any("dynamic" in str(rope.get("rope_type")) for rope in ropes)
    return limits, text_config.max_position_embeddings if is_dynamic else None


# ------------------------------------------------------------------ probes


def ordinary_tokens(config: Any) -> list[int]:
    """Return some token ids that are not special (the image token, for example, is special)."""
    text = config.get_text_config()
    named = [value for part in (config, text) for key, value in vars(part).items() if key.endswith("_token_id")]
    special = {token for value in named for token in (value if isinstance(value, list) else [value])}
    return [token for token in range(min(64, text.vocab_size)) if token not in special]


@torch.no_grad()
def refuse_unless_causal(model: Any, scores: Callable[[Tensor], Tensor] | None = None) -> None:
    """Check that a model's outputs do not depend on later tokens.

    Rows of a batch are padded on the right without a mask, which is correct only for causal models.

    Args:
        model: a Hugging Face model.
        scores: maps ``input_ids [1, L]`` to ``[1, L, ...]``, or to ``[1, L - 1]`` without the first token. None uses the logits.

    Raises:
        ConfigError: the model attends to later tokens, according to the probe or its configuration, so its logits do not predict the
            next token; or its forward pass fails.
    """
    parameter = next(model.parameters())
    reason = "is_causal is false in its configuration"
    if getattr(model.config.get_text_config(), "is_causal", True) is not False:
        tokens = ordinary_tokens(model.config)
        row = [tokens[(7 * column + 3) % len(tokens)] for column in range(_PROBE_TOKENS)]
        other = [*row[:-1], tokens[(tokens.index(row[-1]) + 1) % len(tokens)], *row]
        compute = scores or (lambda ids_BL: model(input_ids=ids_BL).logits)
        try:
            found = [compute(torch.tensor([ids], device=parameter.device)) for ids in (row, other)]
        except RollwrightError:
            raise
        except Exception as error:  # a foreign forward may raise anything
            raise ConfigError(
                f"{type(model).__name__} fails on a row of {_PROBE_TOKENS} tokens: {type(error).__name__}: {error}"
            ) from error
        one, two = (scored[:, : _PROBE_TOKENS - 2].float() for scored in found)
        scale, changed = float((one - one.mean()).abs().max()), float((one - two).abs().max())
        is_half = parameter.dtype.itemsize < 4 or torch.is_autocast_enabled(parameter.device.type)
        if not changed > scale * (0.05 if is_half else 1e-4) + 1e-6:
            return
        reason = f"other tokens at the end change its logits of earlier ones by {changed:.3g} (their range is {scale:.3g})"
    raise ConfigError(
        f"{type(model).__name__} is not a causal language model: {reason}. Its tokens depend on later ones, so it can be neither sampled "
        "nor trained; choose a decoder (is_decoder or is_causal in its config.json)."
    )


_PROBE_TOKENS = 12
