"""Registries of named entries that users can extend, and the plugins that add entries.

One class, ``Registry``, serves workflows, rewards, dataset formats, tasksets, operators, policy losses, advantage
estimators, backends, sinks and selectors::

    WORKFLOWS = Registry("workflow", WorkflowError, variable="WORKFLOWS", built_in={"rlvr": "rollwright.workflows.rlvr:RLVRWorkflow"})

    @WORKFLOWS.register("my_workflow")
    class MyWorkflow: ...

``get`` takes a registered name or an import path. It first looks up the registered and built-in names (built-in entries are
imported on first use), then loads the plugins, and finally imports the path. A plugin that cannot be imported raises an error.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollwright.errors import ConfigError, RollwrightError
from rollwright.neighbours import NEIGHBOURS, PLUGIN_PREFIX

#: Environment variable that lists plugins, separated as in PATH; child processes inherit it.
PLUGIN_VARIABLE = "ROLLWRIGHT_PLUGIN_PATH"
#: Import name -> pip's name of the package.
_PIP_NAMES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dotenv": "python-dotenv",
    "fitz": "pymupdf",
    "git": "gitpython",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "openai": "'rollwright[openai]'",
    "math_verify": "'rollwright[math]'",
    "agentscope": "'rollwright[agentscope]'",
    "reasoning_gym": "'rollwright[reasoning-gym]'",
    "mcp": "'rollwright[mcp]'",
}

Entry = TypeVar("Entry")
Registered = TypeVar("Registered")


class Registry(Generic[Entry]):
    """Maps names to entries that users can add.

    Args:
        kind: what an entry is, in messages: "workflow", "reward function".
        error: class of the errors.
        variable: name of the registry in code, for messages: "WORKFLOWS".
        built_in: import paths of built-in entries; each is imported on first use.
        entry_points: group of entry points whose names are registered, such as "rollwright.workflows".
        marks: keyword arguments of ``register``, which become attributes of the entry.
        accepts: function that decides whether an object can be an entry. By default, any callable can.
        refused: names that are deliberately no entries, each with the reason.
    """

    def __init__(
        self,
        kind: str,
        error: type[RollwrightError] = ConfigError,
        *,
        variable: str,
        built_in: Mapping[str, str] | None = None,
        entry_points: str | None = None,
        marks: Sequence[str] = (),
        accepts: Callable[[Any], bool] = callable,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.error = error
        self.variable = variable
        self.built_in = dict(built_in or {})
        self._entries: dict[str, Entry] = {}
        self._group = entry_points
        self._entry_points_loaded = False
        self._marks = tuple(marks)
        self._accepts = accepts
        self.refused = dict(refused or {})
        self._lock = threading.RLock()

    def register(self, name: str, **marks: Any) -> Callable[[Registered], Registered]:
        """Return a decorator that registers a class or function under a name.

        An entry with the same module and qualified name replaces the earlier one, so a notebook cell can be run again.

        Raises:
            RollwrightError: the registry's error class, if the name is taken by something else.
        """
        if not isinstance(name, str) or not name:
            raise self.error(
                f"register({name!r}): give the name as text: @{self.variable}.register('my_{self.kind.replace(' ', '_')}')."
            )
        if unknown := set(marks) - set(self._marks):
            raise self.error(
                f"{self.variable}.register({name!r}): unknown {', '.join(sorted(unknown))}; known: {', '.join(self._marks) or 'none'}."
            )

        def add(entry: Registered) -> Registered:
            self[name] = entry
            for mark, value in marks.items():
                setattr(entry, mark, value)
            return entry

        return add

    #: Another name of ``register``, for ported code.
    register_module = register

    def get(self, name: str) -> Entry:
        """Return the entry of a registered name or an import path: ``package.module:attribute`` or ``package.module.attribute``.

        Raises:
            RollwrightError: the registry's error class, if nothing was found; the message lists what was tried.
        """
        if name in self:
            if name not in self._entries:
                with self._lock:
                    self._entries.setdefault(name, import_path(self.built_in[name], self.kind, self.error))
            return self._entries[name]
        if name in self.refused:
            raise self.error(f"{name!r} is no {self.kind} here: {self.refused[name]}.")
        tried = [f"registered names ({', '.join(self.names())})"]
        found = _find(name, self.kind, self.error, tried)
        if found is not None:
            if self._accepts(found):
                return found
            tried.append(f"{name} is {type(found).__name__}, which is no {self.kind}")
        declare = f", or declare an entry point of the group {self._group!r}" if self._group else ""
        last = re.split("[.:]", name)[-1]  # code from other systems names a built-in class by another path
        classes = {re.split("[.:]", path)[-1]: path.replace(":", ".") for path in self.built_in.values()}
        is_path = re.search("[.:]", name) is not None and bool(tried[1:])
        known = [] if is_path else [*self._entries, *self.built_in]
        hint = suggestion(last, {last: classes[last]} if last in classes else known, as_sentence=True)
        if is_path:  # the registered names would not help
            raise self.error(
                f"{self.kind} {name!r} was not found.{hint} Tried: {'; '.join(tried[1:])}. It is an import path: modules are looked for in the "
                "current directory, in PYTHONPATH and among installed packages."
            )
        raise self.error(
            f"{self.kind} {name!r} was not found.{hint} Tried: {'; '.join(tried)}. Give a registered name (register it with "
            f"@{self.variable}.register in a module that is imported or in a plugin: plugins: in the config, --plugin-dir, "
            f"{PLUGIN_VARIABLE}{declare}) or an import path such as 'my_package.my_module:my_{self.kind.replace(' ', '_')}'."
        )

    def build(self, name: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Call the entry of ``name`` with the arguments.

        Raises:
            RollwrightError: the registry's error class, if there is no such entry or the entry does not accept these arguments.
        """
        factory: Any = self.get(name)
        if why := why_not_called(factory, *arguments, **keywords):
            given = ", ".join([*map(repr, arguments), *(f"{key}={value!r}" for key, value in keywords.items())])
            raise self.error(
                f"{self.kind} {name!r} was given {given or 'no arguments'}, but {why}; it takes {inspect.signature(factory)}."
            )
        return factory(*arguments, **keywords)

    def names(self) -> list[str]:
        """Return all names, including those of plugins, sorted."""
        self.load_plugins()
        return sorted({*self._entries, *self.built_in})

    def load_plugins(self) -> None:
        """Import all plugins and this registry's entry points now."""
        PLUGINS.load()
        with self._lock:
            if self._group is None or self._entry_points_loaded:
                return
            self._entry_points_loaded = True
            for point in importlib.metadata.entry_points(group=self._group):
                try:
                    entry = point.load()
                except Exception as error:  # an installed package can fail in any way
                    self._entry_points_loaded = False
                    raise self.error(
                        f"plugin {point.name!r} ({point.value}, entry point of {self._group!r}) cannot be imported: "
                        f"{type(error).__name__}: {error}. Fix it or uninstall it."
                    ) from error
                if not inspect.ismodule(entry):
                    self[point.name] = entry

    def __getitem__(self, name: str) -> Entry:
        return self.get(name)

    def __setitem__(self, name: str, entry: Any) -> None:
        with self._lock:
            known = name in self._entries
            taken = _identity(self._entries[name]) if known else self.built_in.get(name, "").replace(":", ".")
            if taken not in ("", _identity(entry)):
                raise self.error(
                    f"{self.kind} name {name!r} is taken by {taken}, so {_identity(entry)} cannot have it: register it under another name."
                )
            self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._entries and name not in self.built_in:
            self.load_plugins()
        return name in self._entries or name in self.built_in

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())


class Plugins:
    """Users' Python files, directories of files, and modules, which register their entries when they are imported.

    The list is kept in an environment variable, so that child processes import the same plugins.
    """

    def __init__(self) -> None:
        self._loaded: set[str] = set()
        self._lock = threading.RLock()

    @property
    def sources(self) -> list[str]:
        """Paths and module names, in import order."""
        return [part for part in os.environ.get(PLUGIN_VARIABLE, "").split(os.pathsep) if part]

    def add(self, source: str | Path, relative_to: str | Path | None = None) -> str:
        """Add a Python file, a directory of such files, or a module, which ``load`` imports when a registry does not know a name.

        Args:
            source: a path, or the name of a module if there is no such path.
            relative_to: base directory of a relative path; by default the current one.

        Returns:
            The absolute path, or the module's name.

        Raises:
            ConfigError: there is no such path or module.
        """
        path = (Path(relative_to or ".") / Path(source).expanduser()).resolve()
        if path.is_dir() or (path.is_file() and path.suffix == ".py"):
            found = str(path)
        elif all(part.isidentifier() for part in str(source).split(".")) and _module_exists(str(source)):
            found = str(source)
        else:
            raise ConfigError(
                f"plugin {str(source)!r}: {path} does not exist; give a Python file, a directory that holds Python files, or a module."
            )
        with self._lock:
            if found not in self.sources:
                os.environ[PLUGIN_VARIABLE] = os.pathsep.join([*self.sources, found])
        return found

    def load(self) -> None:
        """Import each plugin that was added or that the environment variable lists, once.

        Raises:
            ConfigError: a plugin does not exist or cannot be imported.
        """
        with self._lock:
            for source in self.sources:
                path = Path(source).expanduser()
                if path.is_dir():
                    for file in sorted(path.resolve().glob("[!_]*.py")):
                        self._import(str(file))
                elif path.is_file() or (os.sep not in source and _module_exists(source)):
                    self._import(source)
                else:
                    raise ConfigError(f"{PLUGIN_VARIABLE} names {source}, which does not exist: correct or unset it.")

    def _import(self, source: str) -> None:
        if source in self._loaded or any(getattr(module, "__file__", None) == source for module in list(sys.modules.values())):
            return
        self._loaded.add(source)  # first: a plugin may look names up while it is imported
        try:
            if source.endswith(".py"):
                _import_file(Path(source))
            else:
                importlib.import_module(source)
        except Exception as error:  # a user's file can fail in any way
            self._loaded.discard(source)
            hint = missing_module_hint(error)
            raise ConfigError(
                f"plugin {source} cannot be imported: {type(error).__name__}: {error}{hint}. Fix it or leave it out."
            ) from error


#: The plugins of this process.
PLUGINS = Plugins()


def suggestion(
    word: object, known: Iterable[Any] | Mapping[str, str], *, as_sentence: bool = False, cutoff: float = 0.6
) -> str:
    """Return ``; did you mean 'NAME'?`` with the known name closest to a misspelt word, or an empty string if none is close.

    Args:
        word: the misspelt word.
        known: the known names. In a mapping, the keys are compared and the value is shown.
        as_sentence: return a new sentence, `` Did you mean 'NAME'?``.
        cutoff: minimum similarity, as ``difflib`` measures it.
    """
    names: Mapping[str, str] = known if isinstance(known, Mapping) else {str(name): str(name) for name in known}
    close = get_close_matches(str(word), sorted(names), n=1, cutoff=cutoff)
    return f"{' Did' if as_sentence else '; did'} you mean {names[close[0]]!r}?" if close else ""


def nearest(word: object, known: Iterable[object]) -> str:
    """Return the end of a message: the known name closest to a misspelt word, or all known names if none is close."""
    names = sorted({str(name) for name in known})
    return suggestion(word, names)[2:] or (f"known: {', '.join(names)}." if names else "no keys are known here.")


def import_path(path: str, what: str, error: type[RollwrightError] = ConfigError) -> Any:
    """Import ``package.module:attribute`` or ``package.module.attribute``.

    Args:
        path: the import path.
        what: kind of the object, for messages.
        error: class of the errors.

    Raises:
        RollwrightError: ``error``, if there is no such object or its module fails to import.
    """
    tried: list[str] = []
    found = _find(path, what, error, tried)
    if found is None:
        raise error(f"{what} {path!r} was not found. Tried: {'; '.join(tried) or 'nothing: it is no import path'}.")
    return found


def why_not_called(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> str:
    """Return why a function cannot be called with these arguments; empty if it can be, or if it has no signature (some C functions)."""
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except (TypeError, ValueError) as error:
        return str(error) if isinstance(error, TypeError) else ""
    return ""


def missing_module_hint(error: BaseException) -> str:
    """Return a hint about a missing module, to append to the error's message; empty for other errors."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    top = error.name.partition(".")[0]
    if top in import_path("rollwright.compat:PACKAGES", "table"):
        return "; in code from another system, import its names from rollwright (docs/coming-from.md lists them)"
    if top == "rollwright":
        return "; names are imported from rollwright itself (docs/coming-from.md lists those of other systems)"
    names = {**_PIP_NAMES, **import_path("rollwright.compat:PIP_NAMES", "table")}
    if _module_exists(top):
        return f"; {top} is installed, but has no such module: its version may not fit"
    return f"; install it: pip install {names.get(top, top)} (if it is a file of yours, put it beside the plugin, or its directory on PYTHONPATH)"


def _find(path: str, what: str, error: type[RollwrightError], tried: list[str]) -> Any:
    """Find the object at an import path, or return None and add the reasons to ``tried``. Raise ``error`` if a module fails to import."""
    parts = path.replace(":", ".").split(".")
    if len(parts) < 2 or not all(parts):
        return None
    for cut in range(len(parts) - 1, 0, -1):
        module, attributes = ".".join(parts[:cut]), parts[cut:]
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as missing:
            if missing.name is None or not f"{module}.".startswith(f"{missing.name}."):
                raise error(
                    f"module {module!r} of {what} {path!r} cannot be imported: {missing}{missing_module_hint(missing)}."
                ) from missing
            tried.append(f"module {module!r} (there is no module {missing.name!r})")
            if "." not in missing.name:  # so it has no submodules either
                return None
            continue
        except Exception as failure:  # a user's module can fail in any way
            hint = missing_module_hint(failure)
            raise error(
                f"module {module!r} of {what} {path!r} cannot be imported: {type(failure).__name__}: {failure}{hint}."
            ) from failure
        for attribute in attributes:
            if not hasattr(found, attribute):
                public = [name for name, value in vars(found).items() if callable(value) and not name.startswith("_")]
                hint = suggestion(attribute, public)
                tried.append(f"{'.'.join(attributes)!r} in module {module!r} (it has no {attribute!r}{hint})")
                return None
            found = getattr(found, attribute)
        return found
    return None


def _import_file(file: Path) -> None:
    name = f"{PLUGIN_PREFIX}{file.parent.name}_{file.stem}"
    if name in sys.modules:  # of a directory with the same name elsewhere
        name += f"_{zlib.crc32(str(file.parent).encode()):08x}"
    spec: Any = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        NEIGHBOURS.add(file)
        spec.loader.exec_module(module)
    except BaseException:
        for known in [known for known, loaded in sys.modules.items() if loaded is module]:
            del sys.modules[known]
        raise


def _module_exists(name: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(name) is not None
    return False


def _identity(entry: Any) -> str:
    """Return the module and qualified name of an entry; for an instance, the module of its class and its ``repr``."""
    if hasattr(entry, "__qualname__"):
        return f"{entry.__module__}.{entry.__qualname__}"
    return f"{type(entry).__module__}.{entry!r}"
