"""The keys of a config as they were written: a YAML file with the line of each key, and ``key=value`` overrides.

Paths are tuples of keys and list positions: ``("actor", "optimizer", "lr")``, ``("stages", 1, "name")``.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from rollwright.config.secrets import is_secret_name, shown
from rollwright.errors import ConfigError
from rollwright.registry import import_path

KeyPath = tuple[str | int, ...]


_FastestLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_FastestLoader):
    """Reads plain scalars as YAML 1.2 does: ``1e-5`` is a number; ``yes``, ``0130`` and ``2026-11-21`` are strings."""

    yaml_implicit_resolvers: ClassVar[dict] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes strings that a YAML 1.1 or 1.2 reader would not read as strings."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in (
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\d[\d_]*\.\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\d[\d_]*[eE][-+]?\d+|[-+]?\.inf|\.nan", "-+.0123456789"),
):
    for _reader in (_Loader, _Dumper):
        _reader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))

_constructor = yaml.constructor.SafeConstructor()


def dotted(path: KeyPath) -> str:
    """Return a path as users write it: ``actor.optimizer.lr``."""
    return ".".join(str(part) for part in path)


def undotted(key: str) -> KeyPath:
    """Return the path that ``dotted`` writes as ``key``."""
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


@dataclass
class Override:
    """One ``key=value`` argument of the command line."""

    text: str
    path: KeyPath
    value: Any
    raw: str


@dataclass(frozen=True)
class Written:
    """Original name and location of a key that was renamed."""

    key: str
    place: str


@dataclass
class Document:
    """The content of a YAML file before interpolation: containers, line numbers and the file's name.

    ``written`` and ``notes`` are set for translated files: the original names of the keys, and a message to the user about each key.
    """

    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    file: str = "<config>"
    written: dict[KeyPath, Written] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Origins:
    """Where values come from, for messages: a file and line, or an override of the command line.

    ``prefixes`` are the positions in the document at which a path is looked up; the first match wins, so a stage's own keys take
    precedence over the shared ones.
    """

    document: Document
    overrides: list[Override] = field(default_factory=list)
    prefixes: tuple[KeyPath, ...] = ((),)
    renamed: dict[KeyPath, Written] = field(default_factory=dict)  # keys that were given under a second name

    def of(self, path: KeyPath) -> str:
        """Return where a key was set: ``file:line`` or an override. If the key was not written, return that of its nearest parent."""
        for above in (path[:length] for length in range(len(path), -1, -1)):
            if override := self._override(above):
                return f"override {override.text!r}"
            if written := self._written(above):
                return written.place
            places = [(*prefix, *above) for prefix in self.prefixes]
            if lines := [self.document.lines[place] for place in places if place in self.document.lines]:
                return f"{self.document.file}:{lines[0]}"
            below = [each for each in self.overrides if above and any(each.path[: len(place)] == place for place in places)]
            if below:  # the last one created the mapping
                return f"override {below[-1].text!r}"
        return self.document.file

    def name(self, path: KeyPath) -> str:
        """Return the name of a key for messages: as it was written, and its name here if that differs."""
        written = self._written(path)
        if written is None or written.key == dotted(path) or self._override(path):
            return dotted(path)
        return f"{written.key} (here {dotted(path)})"

    def _written(self, path: KeyPath) -> Written | None:
        return self.renamed.get(path) or self.document.written.get(path)

    def directory(self, path: KeyPath) -> Path:
        """Return the base directory of a relative path in the key ``path``: the config file's or, in an override, the current one."""
        overridden = any(self._override(path[:length]) for length in range(1, len(path) + 1))
        return Path() if overridden else Path(self.document.file).parent

    def raw(self, path: KeyPath) -> str | None:
        """Return the text after the ``=`` of the override that set exactly this key, or None."""
        override = self._override(path)
        return override.raw if override else None

    def _override(self, path: KeyPath) -> Override | None:
        places = [(*prefix, *path) for prefix in self.prefixes]
        return next((override for override in reversed(self.overrides) if override.path in places), None)


class ConfigDialect:
    """Another system's config: names of its keys, and the shape of its files. See ``rollwright.compat``."""

    #: Name of the system in messages.
    system: ClassVar[str] = ""
    #: Name of a config dataclass -> (key in the user's file -> field); read with a warning.
    renamed: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    #: Like ``renamed``, for names that are read without a warning.
    second_names: ClassVar[Mapping[str, Mapping[str, str]]] = {}

    def recognises(self, data: dict[str, Any]) -> bool:
        """Return True if a file with these keys belongs to the other system."""
        return False

    def translate(self, data: dict[str, Any], origins: Origins) -> Document:
        """Translate a file to a document with this project's keys, which remembers how each key was written.

        Args:
            data: the file's keys, overrides applied and interpolations resolved.
            origins: where they were written, for messages.

        Raises:
            ConfigError: lists every key that is not supported, with file and line.
        """
        raise NotImplementedError


@cache
def dialects() -> Sequence[type[ConfigDialect]]:
    """Return the dialects of the systems whose files and key names are understood."""
    return import_path("rollwright.compat.dialects:DIALECTS", "table")


def read_yaml(file: str | Path) -> Document:
    """Read one YAML mapping from a file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, has a duplicate key, or is not a mapping.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        where = "" if Path(file).is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(f"there is no config file {file}{where}: give the path of a YAML file.") from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the config file {file} cannot be read: {why}; give the path of a YAML file.") from error
    return parse_yaml(text, file=str(file))


def parse_yaml(text: str, file: str = "<config>") -> Document:
    """Parse one YAML mapping from a string, as ``read_yaml`` does; ``file`` is the name used in messages."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else file
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{where}: this is not YAML: {problem}.") from error
    document = Document(data={}, file=file)
    if node is None:
        return document
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{file}:{node.start_mark.line + 1}: a config is a mapping of keys, this is a {node.id}.")
    document.data = _construct(node, (), document)
    return document


def dump_yaml(data: Any) -> str:
    """Dump plain containers as YAML, with keys in their order; ``parse_yaml`` reads the same values back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def parse_value(raw: str) -> Any:
    """Parse the value of an override as YAML (``1e-5``, ``true``, ``null``, ``[a, b]``, ``{a: 1}``); return invalid YAML unchanged."""
    try:
        node = yaml.compose(raw, Loader=_Loader)
        return None if node is None else _construct(node, (), Document(data={}))
    except (yaml.YAMLError, ConfigError):
        return raw


def _construct(node: yaml.Node, path: KeyPath, document: Document, above: tuple[yaml.Node, ...] = ()) -> Any:
    document.lines.setdefault(path, node.start_mark.line + 1)
    if node in above:
        where = f"{document.file}:{document.lines[path]}"
        raise ConfigError(f"{where}: {dotted(path)} is an alias of what it stands in, which never ends; write it out.")
    above = (*above, node)
    if isinstance(node, yaml.MappingNode):
        _flatten_merges(node)
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key: Any = _scalar(key_node, document) if isinstance(key_node, yaml.ScalarNode) else None
            line, inner = key_node.start_mark.line + 1, (*path, key)
            if key is None:
                raise ConfigError(f"{document.file}:{line}: a key is a word, not a {key_node.id}.")
            if key in result:
                first = document.lines[inner]
                raise ConfigError(f"{document.file}:{line}: {dotted(inner)} stands twice (first on line {first}); keep one.")
            document.lines[inner] = line
            result[key] = _construct(value_node, inner, document, above)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(child, (*path, index), document, above) for index, child in enumerate(node.value)]
    return _scalar(node, document)


def _flatten_merges(node: yaml.MappingNode) -> None:
    """Resolve ``<<: *anchor``; the mapping's own keys override merged ones."""
    if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
        own = [(key, value) for key, value in node.value if key.tag != "tag:yaml.org,2002:merge"]
        names = {key.value for key, _ in own}
        _constructor.flatten_mapping(node)
        merged = {key.value: (key, value) for key, value in node.value if key.value not in names}
        node.value = [*merged.values(), *own]


def _scalar(node: yaml.Node, document: Document) -> Any:
    try:
        return _constructor.construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        where = f"{document.file}:{node.start_mark.line + 1}"
        raise ConfigError(f"{where}: {getattr(node, 'value', '?')!r} cannot be read: {error}. Put text in quotes.") from error


# --- values


def merge(base: Any, over: Any) -> Any:
    """Merge ``over`` onto ``base``: mappings are merged key by key, anything else is replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: merge(base[key], value) if key in base else value for key, value in over.items()}}
    return copy.deepcopy(over)


def default_of(each: dataclasses.Field) -> Any:
    """Return a new default value of a field, or ``MISSING`` if it has none."""
    return each.default if each.default_factory is dataclasses.MISSING else each.default_factory()


def plain(value: Any, metadata: Mapping[str, Any] | None = None) -> Any:
    """Convert dataclasses, enums and paths to values that YAML can represent, with placeholders for secrets.

    Args:
        value: a config, or the value of a key.
        metadata: metadata of the key.
    """
    metadata = metadata or {}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), field.metadata) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(element, {"secret": is_secret_name(key), **metadata}) for key, element in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(element, metadata) for element in value]
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return shown(value, metadata)
    known = value is None or isinstance(value, (int, float, bool))
    return getattr(value, "value", value if known else str(value))
