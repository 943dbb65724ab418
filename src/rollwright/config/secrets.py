"""Secrets of a config: used in full, and never written, printed or sent.

Three kinds of strings are secret: values of keys that are marked as secret (``key(None, "…", secret=True)``), literals in a free-form
mapping under a key such as ``api_key``, ``hf_token`` or ``password``, and values from environment variables. A value from an
environment variable is written as its interpolation, ``${oc.env:NAME}``, so that a written config can be run again. The other secrets
are written as ``***``, which is an error when it is read. Keys marked ``public`` (paths and names, which the run directory shows
anyway) and keys with a fixed choice of values are written unchanged. The password in a URL is always written as ``***``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

#: Placeholder of a secret.
HIDDEN = "***"

_NAMES = r"(?:api[_-]?key|(?:auth|access|api|hf|bearer)[_-]?token|password|passwd|secret(?:[_-]?key)?)"
_SECRET_NAME = re.compile(rf"(?i){_NAMES}$")
_SECRET_ARGUMENT = re.compile(rf"(?i)({_NAMES}[= ])\S+")
_URL_PASSWORD = re.compile(r"(://[^\s:/@]*:)[^\s/@]+@")


class Secret(str):
    """A string that is used like any other, but shown as ``written``.

    Args:
        value: the string itself.
        written: what is shown instead: the interpolation that the value comes from, or ``***``.
    """

    written: str

    def __new__(cls, value: str, written: str = HIDDEN) -> Secret:
        made = super().__new__(cls, value)
        made.written = written
        return made

    def __repr__(self) -> str:
        return repr(self.written)


def is_secret_name(key: object) -> bool:
    """Return True for typical names of secrets in mappings with free keys: ``api_key``, ``HF_TOKEN``, ``password``."""
    return bool(_SECRET_NAME.search(str(key)))


def command_line(words: Iterable[str]) -> str:
    """Join the words of a command, with ``***`` in place of values whose option or key is named like a secret."""
    return _SECRET_ARGUMENT.sub(rf"\1{HIDDEN}", " ".join(words))


def shown(text: str, metadata: Mapping[str, Any]) -> str:
    """Return how a string is written under a key that has this metadata."""
    if metadata.get("public"):
        return str(text)
    if isinstance(text, Secret):
        return text.written
    return HIDDEN if metadata.get("secret") and text else _URL_PASSWORD.sub(rf"\1{HIDDEN}@", text)


def hidden_by_name(key: object, value: Any) -> Any:
    """Return the value, converted to a ``Secret`` if it is a string and its key is named like a secret."""
    return Secret(value) if type(value) is str and value and is_secret_name(key) else value


# --- strings that may be secret ----------------------------------------------------------------------------------------


def secrets_of(config: Any, metadata: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield every string of a config that is written as ``***``."""
    return (text for text, written in _texts_of(config, metadata or {}) if written == HIDDEN)


def hidden_texts(config: Any) -> set[str]:
    """Return all strings of a config that must never be output: values masked as ``***``, and values from environment variables.

    Values from environment variables are included only if they have at least 8 characters, because a shorter one, such as a number of
    steps, may appear elsewhere by chance.
    """
    texts = _texts_of(config, {})
    return {
        str(text)
        for text, written in texts
        if written == HIDDEN or (isinstance(text, Secret) and written != text and len(text) >= 8)
    }


def _texts_of(config: Any, metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every string of a config, and how it is written."""
    if is_dataclass(config):
        for each in fields(config):
            yield from _texts_of(getattr(config, each.name), each.metadata)
    elif isinstance(config, dict):
        for key, item in config.items():
            yield from _texts_of(item, {"secret": is_secret_name(key), **metadata})
    elif isinstance(config, list | tuple):
        for item in config:
            yield from _texts_of(item, metadata)
    elif isinstance(config, str) and config:
        yield config, shown(config, metadata)


def copy_without_secrets(source: Path, target: Path, secrets: set[str]) -> None:
    """Copy a YAML file with ``***`` in place of secret values and of passwords in URLs."""
    text = source.read_text(encoding="utf-8")
    values = [token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken) and token.value in secrets]
    for token in reversed(values):
        text = f'{text[: token.start_mark.index]}"{HIDDEN}"{text[token.end_mark.index :]}'
    target.write_text(_URL_PASSWORD.sub(rf"\1{HIDDEN}@", text), encoding="utf-8")
