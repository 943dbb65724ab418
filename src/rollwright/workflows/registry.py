"""Workflows by name: the registry, import paths, plugins.

A name is looked for in this order: what was registered by ``register_module``; the entry points of the group
``rollwright.workflows`` and the modules of the plugin directories, which are imported when a name is first not found; and,
where it has a dot, the import path. A plugin that cannot be imported is an error, not a gap.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import threading
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from rollwright.errors import WorkflowError
from rollwright.registry import PLUGIN_VARIABLE, PLUGINS

ENTRY_POINT_GROUP = "rollwright.workflows"

Registered = TypeVar("Registered")

#: Workflows that come with Rollwright, by their registered name; imported when asked for.
BUILT_IN = {
    "rlvr": "rollwright.workflows.rlvr.RLVRWorkflow",
    "multi_turn": "rollwright.workflows.multi_turn.MultiTurnWorkflow",
    "vision_rlvr": "rollwright.workflows.vision_rlvr.VisionRLVRWorkflow",
    "parallel_generation": "rollwright.workflows.parallel_generation.ParallelGenerationWorkflow",
    "search_agent": "rollwright.workflows.search_agent.SearchAgentWorkflow",
    "grouped_search_agent": "rollwright.workflows.search_agent.GroupedSearchAgentWorkflow",
    "tool_integrated": "rollwright.workflows.tool_integrated.ToolIntegratedWorkflow",
    "simple_workflow": "rollwright.workflows.simple.SimpleWorkflow",
    "math_workflow": "rollwright.workflows.simple.MathWorkflow",
    "math_boxed_workflow": "rollwright.workflows.simple.MathBoxedWorkflow",
    "webshop_workflow": "rollwright.workflows.webshop.WebShopWorkflow",
    "openai_agent": "rollwright.rollout.openai_agent.OpenAIAgentWorkflow",
    "tool_calling_workflow": "rollwright.workflows.tool_calling.ToolCallingWorkflow",
    "agentscope_react_math_workflow": "rollwright.workflows.agentscope_react.AgentScopeReactMathWorkflow",
}


class WorkflowRegistry:
    """Names and the classes they stand for."""

    def __init__(self, entry_point_group: str = ENTRY_POINT_GROUP) -> None:
        self._group = entry_point_group
        self._modules: dict[str, Any] = {}
        self._plugin_directories: list[Path] = []
        self._lock = threading.RLock()
        self._loaded_entry_points = False
        self._loaded_files: set[Path] = set()

    def register_module(self, name: str) -> Callable[[Registered], Registered]:
        """A class decorator: ``@WORKFLOWS.register_module("my_workflow")``.

        The same module and qualified name under the same name replaces (a cell that is run again, a reloaded module);
        another class is refused.

        Raises:
            WorkflowError: the name stands for another class.
        """
        if not isinstance(name, str) or not name:
            raise WorkflowError(f"register_module({name!r}): give the name as text: @WORKFLOWS.register_module('my_workflow').")

        def register(module: Registered) -> Registered:
            with self._lock:
                known = self._modules.get(name)
                if known is not None and _identity(known) != _identity(module):
                    raise WorkflowError(
                        f"workflow name {name!r} stands for {_path(known)} already and cannot also stand for {_path(module)}; "
                        "register one of the two under another name."
                    )
                self._modules[name] = module
            return module

        return register

    def add_plugin_directory(self, directory: str | Path) -> None:
        """Import the Python files of a directory when a name is first not found.

        Raises:
            WorkflowError: it is no directory.
        """
        path = Path(directory).expanduser().resolve()
        if not path.is_dir():
            raise WorkflowError(f"plugin directory {path} does not exist: give a directory that holds Python files.")
        with self._lock:
            if path not in self._plugin_directories:
                self._plugin_directories.append(path)

    @property
    def plugin_directories(self) -> list[Path]:
        """The directories that were added; those of the environment are not among them."""
        return list(self._plugin_directories)

    def load_plugins(self) -> None:
        """Import the entry points and the files of plugin directories now: what else they register is found then, too."""
        self._load_plugins()

    def names(self) -> list[str]:
        """All registered names, plugins' included, sorted."""
        self._load_plugins()
        return sorted({*self._modules, *BUILT_IN})

    def get(self, name: str) -> Any:
        """The class of a registered name or an import path.

        Raises:
            WorkflowError: nothing was found; the message lists what was tried.
        """
        tried: list[str] = []
        if name in self._modules:
            return self._modules[name]
        self._load_plugins()
        if name in self._modules:
            return self._modules[name]
        tried.append(f"registered names ({', '.join(sorted({*self._modules, *BUILT_IN}))})")
        if name in BUILT_IN:
            return _import(BUILT_IN[name], tried)
        if "." in name or ":" in name:
            found = _import(name, tried)
            if found is not None:
                return found
        hint = self._hint(name)
        raise WorkflowError(
            f"workflow {name!r} was not found.{hint} Tried: {'; '.join(tried)}. Give a registered name (import the module that "
            f"registers it, put it into a plugin directory (--plugin-dir, {PLUGIN_VARIABLE}), or declare an entry point of the group "
            f"{self._group!r}) or an import path such as 'my_package.my_module.MyWorkflow'."
        )

    def _hint(self, name: str) -> str:
        """A built-in class of the same name, which code from elsewhere has at another path, else the nearest registered name."""
        last = re.split("[.:]", name)[-1]
        ported = next((path for path in BUILT_IN.values() if path.endswith(f".{last}")), None)
        near = [ported] if ported else get_close_matches(last, [*self._modules, *BUILT_IN], n=1)
        return f" Did you mean {near[0]!r}?" if near else ""

    def __contains__(self, name: object) -> bool:
        return name in self._modules or name in BUILT_IN

    def _load_plugins(self) -> None:
        with self._lock:
            if not self._loaded_entry_points:
                self._loaded_entry_points = True
                for point in importlib.metadata.entry_points(group=self._group):
                    self._load_entry_point(point)
            PLUGINS.load()
            for directory in self._plugin_directories:
                for file in sorted(directory.resolve().glob("*.py")):
                    if not file.name.startswith("_") and file not in self._loaded_files:
                        self._load_file(file)

    def _load_entry_point(self, point: importlib.metadata.EntryPoint) -> None:
        try:
            module = point.load()
        except Exception as error:
            self._loaded_entry_points = False
            raise WorkflowError(
                f"plugin {point.name!r} ({point.value}, entry point of {self._group!r}) cannot be imported: "
                f"{type(error).__name__}: {error}. Mend it or uninstall it."
            ) from error
        if inspect.isclass(module):
            self.register_module(point.name)(module)

    def _load_file(self, file: Path) -> None:
        name = f"rollwright_plugin_{file.parent.name}_{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise WorkflowError(
                f"plugin {file} cannot be imported: {type(error).__name__}: {error}. Mend it or take it out of the directory."
            ) from error
        self._loaded_files.add(file)


WORKFLOWS = WorkflowRegistry()


def resolve_workflow(workflow: Any, kwargs: dict[str, Any] | None = None) -> Any:
    """The instance that a user means by a class, an instance, a registered name or an import path.

    Args:
        workflow: what the user gave.
        kwargs: arguments of the constructor; refused for an instance, which is built already.

    Raises:
        WorkflowError: not found, not buildable from these arguments, or without ``arun_episode``.
    """
    if isinstance(workflow, str):
        workflow = WORKFLOWS.get(workflow)
    if not inspect.isclass(workflow):
        if not _is_workflow(workflow) and callable(workflow):
            return _build(workflow, kwargs or {})
        if kwargs:
            raise WorkflowError(
                f"workflow_kwargs ({', '.join(kwargs)}) were given with an instance of {type(workflow).__name__}, which is built "
                "already: give the class, or leave them out."
            )
        return _checked(workflow)
    if hasattr(workflow, "run") and not _is_workflow(workflow):
        raise _no_workflow(workflow)  # before it is asked for arguments that only a task runner has
    return _build(workflow, kwargs or {})


def resolve_function(function: Any, what: str) -> Callable[..., Any]:
    """A function, or the one that an import path names.

    Raises:
        WorkflowError: it cannot be found or is not callable.
    """
    if isinstance(function, str):
        tried: list[str] = []
        found = _import(function, tried)
        if found is None:
            raise WorkflowError(
                f"{what} {function!r} was not found. Tried: {'; '.join(tried) or 'nothing: it is no import path'}."
            )
        function = found
    if not callable(function):
        raise WorkflowError(f"{what} is {function!r}, which cannot be called: give a function or its import path.")
    return function


def workflow_name(workflow: Any) -> str:
    """How messages name a workflow: the qualified name of its class, without the places of local classes."""
    return type(workflow).__qualname__.rsplit("<locals>.", 1)[-1]


def _build(factory: Any, kwargs: dict[str, Any]) -> Any:
    try:
        inspect.signature(factory).bind(**kwargs)
    except TypeError as error:
        raise WorkflowError(
            f"{_path(factory)} cannot be built from workflow_kwargs ({', '.join(kwargs) or 'none'}): {error}. "
            f"Its signature is {factory.__name__}{inspect.signature(factory)}."
        ) from error
    except ValueError:  # no signature to look at
        pass
    return _checked(factory(**kwargs))


def _is_workflow(workflow: Any) -> bool:
    return callable(getattr(workflow, "arun_episode", None))


def _no_workflow(kind: type) -> WorkflowError:
    instead = "Define 'async def arun_episode(self, engine, data)'."
    if hasattr(kind, "run"):
        instead = (
            "It has run(): task-style workflows are run over a taskset that names them (tasksets, workflow; "
            "docs/task-workflows.md)."
        )
    return WorkflowError(f"{kind.__name__} is no workflow: it has no method arun_episode(engine, data). {instead}")


def _checked(workflow: Any) -> Any:
    if not _is_workflow(workflow):
        raise _no_workflow(type(workflow))
    function = inspect.unwrap(workflow.arun_episode)
    if (inspect.isfunction(function) or inspect.ismethod(function)) and not inspect.iscoroutinefunction(function):
        raise WorkflowError(
            f"{type(workflow).__name__}.arun_episode is not async: write 'async def arun_episode' and await the engine in it."
        )
    return workflow


def _import(path: str, tried: list[str]) -> Any:
    """What an import path names, or None; ``tried`` is told why not. A module that is there but fails is an error."""
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    if not module_name:
        return None
    inner: list[str] = [attribute]
    while module_name:
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise WorkflowError(f"module {module_name!r} of {path!r} cannot be imported: {error}.") from error
            tried.append(f"module {module_name!r} (there is no module {error.name!r})")
            module_name, _, attribute = module_name.rpartition(".")
            inner.insert(0, attribute)
            continue
        except Exception as error:
            raise WorkflowError(
                f"module {module_name!r} of {path!r} cannot be imported: {type(error).__name__}: {error}."
            ) from error
        for name in inner:
            if not hasattr(found, name):
                public = [
                    known for known in vars(found) if inspect.isclass(getattr(found, known)) and not known.startswith("_")
                ]
                near = get_close_matches(name, public, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                tried.append(f"{'.'.join(inner)!r} in module {module_name!r} (it has no {name!r}{hint})")
                return None
            found = getattr(found, name)
        return found
    return None


def _identity(module: Any) -> tuple[str, str]:
    return getattr(module, "__module__", ""), getattr(module, "__qualname__", repr(module))


def _path(module: Any) -> str:
    return ".".join(_identity(module))
