"""Decoding of recorded tokens with the run's tokenizer, without transformers."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollwright.tracking.logging import getLogger

logger = getLogger("viewer")

_FILE = "tokenizer.json"
_LEGIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level tokenizers write unchanged


class Vocabulary:
    """The tokens of a run's tokenizer.

    Args:
        path: path of a ``tokenizer.json``.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self.path = path
        self._tokenizer = Tokenizer.from_file(str(path))
        added: Mapping[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(number for number, token in added.items() if token.special)
        self.special_texts = tuple(token.content for token in added.values() if token.special and token.content)
        self._parts = self._bytes_of_tokens(added)

    def _bytes_of_tokens(self, added: Mapping[int, Any]) -> list[bytes] | None:
        """Return the bytes of each token if decoding just joins them (byte-level and fused decoders); otherwise None."""
        kind = json.loads(self.path.read_bytes()).get("decoder") or {}
        if kind.get("type") not in ("ByteLevel", "Fuse"):
            return None
        byte_of = {chr(code): code for code in _LEGIBLE}
        byte_of |= {chr(256 + place): code for place, code in enumerate(sorted(set(range(256)) - set(_LEGIBLE)))}
        parts = [b""] * self._tokenizer.get_vocab_size(with_added_tokens=True)
        is_bytes = kind["type"] == "ByteLevel"
        for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if number >= len(parts):
                return None
            if is_bytes and number not in added and all(character in byte_of for character in token):
                parts[number] = bytes(byte_of[character] for character in token)
            else:
                parts[number] = token.encode("utf-8", "replace")
        return parts

    def text(self, ids: Sequence[int]) -> str:
        """Decode tokens, including special ones; an unknown token appears as its id in ``⟨⟩``."""
        if self._parts is not None:
            try:
                return b"".join([self._parts[token] for token in ids]).decode("utf-8", "replace")
            except IndexError:
                return b"".join([self._bytes(token) for token in ids]).decode("utf-8", "replace")
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Decode each token; the joined strings are the whole text. A character that spans several tokens belongs to the last."""
        if self._parts is not None:
            return _characters([self._bytes(token) for token in ids])
        from tokenizers.decoders import DecodeStream

        stream, texts = DecodeStream(skip_special_tokens=False), []
        for token in ids:
            try:
                texts.append(stream.step(self._tokenizer, token) or "")
            except Exception:  # the library has no error class for invalid prefixes
                texts.append(self._tokenizer.id_to_token(token) or f"⟨{token}⟩")
                stream = DecodeStream(skip_special_tokens=False)
        return texts

    def _bytes(self, token: int) -> bytes:
        assert self._parts is not None
        return self._parts[token] if 0 <= token < len(self._parts) else f"⟨{token}⟩".encode()


def _characters(parts: Sequence[bytes]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(parts) - 1
    return [decoder.decode(part, final=number == last) for number, part in enumerate(parts)]


def find_vocabulary(directory: Path, config: Mapping[str, Any], root: Path) -> Vocabulary | None:
    """Find the tokenizer of a run: the one that its config names, or else one of its checkpoints; None if neither is on this machine.

    Args:
        directory: directory of the run or stage.
        config: the flattened config of the run.
        root: directory of the whole run: ``directory``, or for a stage its parent.
    """
    for path in _candidates(directory, config, root):
        if path.is_file():
            try:
                return Vocabulary(path)
            except Exception as error:  # the library raises plain exceptions
                logger.warning("%s is no tokenizer that can be read: %s", path, error)
    return None


def _candidates(directory: Path, config: Mapping[str, Any], root: Path) -> list[Path]:
    found = []
    for key in ("tokenizer_path", "actor.path", "model.path"):
        if name := config.get(key):
            found += [Path(name) / _FILE, directory / name / _FILE, *_downloaded(name)]
    for place in dict.fromkeys((directory, root)):
        found += sorted(place.glob(f"checkpoints/*/{_FILE}")) + sorted(place.glob(f"*/{_FILE}"))
    return found


def _downloaded(name: str) -> list[Path]:
    """Return the paths of a tokenizer downloaded from the Hugging Face Hub."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    is_name = name.count("/") <= 1 and not any(character in name for character in "*?[") and not name.startswith((".", "/"))
    return sorted(hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/{_FILE}")) if is_name else []
