"""The registry that every kind of named thing uses, and the plugins that add to it."""

import importlib
import os
import subprocess
import sys

import pytest

from rollwright.errors import ConfigError, RewardError, WorkflowError
from rollwright.registry import PLUGIN_VARIABLE, Plugins, Registry, import_path

BUILT_IN = {
    "counter": "collections.Counter",
    "ordered": "collections:OrderedDict",
    "dumps": "json.dumps",
}


@pytest.fixture
def registry():
    return Registry("gadget", RewardError, variable="GADGETS", built_in=BUILT_IN, marks=("runs_inline",))


@pytest.fixture
def plugins(monkeypatch):
    fresh = Plugins()
    monkeypatch.setattr("rollwright.registry.PLUGINS", fresh)
    monkeypatch.setenv(PLUGIN_VARIABLE, "")
    return fresh


def test_entries_are_registered_and_found_by_name(registry):
    @registry.register("mine", runs_inline=True)
    def mine(value=1):
        return value

    @registry.register_module("other")
    class Other:
        pass

    assert registry.get("mine") is mine
    assert registry["other"] is Other
    assert mine.runs_inline
    assert not hasattr(Other, "runs_inline")
    assert "mine" in registry
    assert "nobody" not in registry
    assert registry.names() == list(registry) == ["counter", "dumps", "mine", "ordered", "other"]
    assert len(registry) == 5
    del registry["mine"]
    assert "mine" not in registry


def test_built_in_entries_are_imported_when_they_are_asked_for():
    code = (
        "import sys; from rollwright.registry import Registry\n"
        "registry = Registry('gadget', variable='GADGETS', built_in={'table': 'wave.open'})\n"
        "assert 'table' in registry and registry.names() == ['table'] and 'wave' not in sys.modules\n"
        "assert registry.get('table').__name__ == 'open' and 'wave' in sys.modules\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
    )
    without_plugins = {name: value for name, value in os.environ.items() if name != PLUGIN_VARIABLE}  # of other tests
    subprocess.run([sys.executable, "-c", code], check=True, env=without_plugins)


@pytest.mark.parametrize("path", ["collections:OrderedDict", "collections.OrderedDict"])
def test_an_import_path_needs_no_registration(registry, path):
    assert registry.get(path) is registry.get("ordered")
    assert import_path(path, "gadget") is registry.get("ordered")


def test_the_same_class_replaces_itself_and_another_is_refused(registry):
    versions = []
    for _ in range(2):
        scope = {"__name__": "a_notebook"}
        exec("class Gadget: pass", scope)
        versions.append(registry.register("gadget")(scope["Gadget"]))
    assert registry.get("gadget") is versions[1]
    with pytest.raises(RewardError, match=r"gadget name 'gadget' is taken by a_notebook\.Gadget, so test_.* cannot have it"):

        @registry.register("gadget")
        def other():
            pass


def test_a_built_in_name_is_taken_before_it_is_imported(registry):
    with pytest.raises(RewardError, match=r"'counter' is taken by collections\.Counter"):
        registry.register("counter")(dict)
    registry["counter"] = importlib.import_module("collections").Counter


def test_instances_can_be_entries():
    registry = Registry("answer", variable="ANSWERS", accepts=lambda value: isinstance(value, int))
    registry["life"] = 42
    registry["life"] = 42
    with pytest.raises(ConfigError, match=r"'life' is taken by builtins\.42, so builtins\.43 cannot have it"):
        registry["life"] = 43
    assert registry.get("sys.maxsize") == sys.maxsize
    with pytest.raises(ConfigError, match=r"sys\.path is list, which is no answer"):
        registry.get("sys.path")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dump",
            r"^gadget 'dump' was not found\. Did you mean 'dumps'\? Tried: registered names \(counter, dumps, ordered\)\.",
        ),
        (
            "other.system.Counter",
            r"Did you mean 'collections\.Counter'\?.*module 'other.system' \(there is no module 'other'\)",
        ),
        (
            "no_such_module.Counters",
            r"^gadget 'no_such_module\.Counters' was not found\. Tried: module 'no_such_module' \(there is no module 'no_such_module'\)\. It is "
            r"an import path: modules are looked for in the current directory, in PYTHONPATH and among installed packages\.$",
        ),
        ("collections.OrderedDic", r"it has no 'OrderedDic'; did you mean 'OrderedDict'\?"),
        ("sys.maxsize", r"sys\.maxsize is int, which is no gadget"),
        (
            "nothing",
            r"@GADGETS\.register in a module .* --plugin-dir, ROLLWRIGHT_PLUGIN_PATH\).*'my_package\.my_module:my_gadget'",
        ),
        ("", r"^gadget '' was not found"),
        ("a..b", r"^gadget 'a\.\.b' was not found"),
        (
            "broken_gadgets.make",
            r"module 'broken_gadgets' of gadget .* cannot be imported: No module named 'not_there_at_all'; install it: pip install not_there_at_all \(if it is a file of yours",
        ),
        ("failing_gadgets:make", r"module 'failing_gadgets' of gadget .* cannot be imported: RuntimeError: no luck"),
    ],
)
def test_an_error_names_the_nearest_and_what_was_tried(registry, tmp_path, monkeypatch, name, message):
    (tmp_path / "broken_gadgets.py").write_text("import not_there_at_all\n")
    (tmp_path / "failing_gadgets.py").write_text("raise RuntimeError('no luck')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match=message):
        registry.get(name)


def test_names_and_marks_are_checked_when_registering(registry):
    with pytest.raises(RewardError, match=r"give the name as text: @GADGETS\.register\('my_gadget'\)"):
        registry.register(len)
    with pytest.raises(RewardError, match=r"unknown inline; known: runs_inline"):
        registry.register("mine", inline=True)


def test_build_calls_the_entry_and_refuses_wrong_arguments(registry):
    @registry.register("mine")
    def mine(size, scale=1.0):
        return size * scale

    assert registry.build("mine", 2, scale=3) == 6
    with pytest.raises(
        RewardError, match=r"gadget 'mine' was given 2, scales=3, but .*'scales'; it takes \(size, scale=1\.0\)"
    ):
        registry.build("mine", 2, scales=3)


def test_import_path_says_what_it_tried():
    with pytest.raises(WorkflowError, match=r"tool 'json\.nothing' was not found\. Tried: 'nothing' in module 'json'"):
        import_path("json.nothing", "tool", WorkflowError)
    with pytest.raises(ConfigError, match="nothing: it is no import path"):
        import_path("json", "tool")


# --- plugins ----------------------------------------------------------------------------------------------------------

PLUGIN = "import {registry} as home\n\n@home.GADGETS.register('{name}')\ndef {name}():\n    return '{name}'\n"


@pytest.fixture
def home(registry, tmp_path, monkeypatch):
    """A module that plugins import the registry from."""
    module = type(sys)("a_home_of_gadgets")
    module.GADGETS = registry
    monkeypatch.setitem(sys.modules, "a_home_of_gadgets", module)
    return module.__name__


def test_plugins_are_loaded_when_a_name_is_first_not_found(registry, home, plugins, tmp_path, monkeypatch):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "first.py").write_text(PLUGIN.format(registry=home, name="from_directory"))
    (tmp_path / "pack" / "_private.py").write_text("raise RuntimeError('not to be imported')\n")
    (tmp_path / "single.py").write_text(PLUGIN.format(registry=home, name="from_file"))
    (tmp_path / "a_gadget_module.py").write_text(PLUGIN.format(registry=home, name="from_module"))
    (tmp_path / "environment.py").write_text(PLUGIN.format(registry=home, name="from_environment"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGIN_VARIABLE, str(tmp_path / "environment.py"))
    assert plugins.add("pack", relative_to=tmp_path) == str(tmp_path / "pack")
    plugins.add(tmp_path / "single.py")
    plugins.add("a_gadget_module")
    plugins.add("a_gadget_module")
    assert len(plugins.sources) == 4
    assert os.environ[PLUGIN_VARIABLE].split(os.pathsep) == plugins.sources  # child processes see them
    assert registry.get("dumps")  # a built-in name loads no plugin
    assert not any(name.startswith("rollwright_plugin_pack") for name in sys.modules)
    for name in ("from_directory", "from_file", "from_module", "from_environment"):
        assert name in registry
        assert registry.get(name)() == name


def test_a_plugin_that_does_not_exist_is_refused_at_once(plugins, tmp_path, monkeypatch):
    for source in ("nowhere", "nowhere/", "nowhere.py", "no_such_module.deeper"):
        with pytest.raises(ConfigError, match=rf"plugin '{source}': {tmp_path}/nowhere|does not exist"):
            plugins.add(source, relative_to=tmp_path)
    monkeypatch.setenv(PLUGIN_VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=rf"{PLUGIN_VARIABLE} names {tmp_path}/gone, which does not exist"):
        plugins.load()


def test_a_plugin_that_cannot_be_imported_is_an_error_every_time(registry, plugins, tmp_path):
    (tmp_path / "gadgets.py").write_text("import a_package_that_is_not_there\n")
    plugins.add(tmp_path)
    for _ in range(2):
        with pytest.raises(
            ConfigError,
            match=r"plugin .*gadgets\.py cannot be imported: ModuleNotFoundError: .*pip install a_package_that_is_not_there",
        ):
            registry.get("anything")


def test_entry_points(tmp_path, monkeypatch):
    (tmp_path / "shipped_gadgets.py").write_text("class Gadget:\n    pass\n")
    info = tmp_path / "shipped_gadgets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shipped-gadgets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollwright.test_gadgets]\nshipped = shipped_gadgets:Gadget\n")
    monkeypatch.syspath_prepend(tmp_path)
    make = lambda: Registry("gadget", WorkflowError, variable="GADGETS", entry_points="rollwright.test_gadgets")  # noqa: E731
    assert make().get("shipped").__name__ == "Gadget"
    (info / "entry_points.txt").write_text("[rollwright.test_gadgets]\nlost = shipped_gadgets:Lost\n")
    importlib.invalidate_caches()
    with pytest.raises(
        WorkflowError, match=r"plugin 'lost' \(shipped_gadgets:Lost, entry point of 'rollwright\.test_gadgets'\)"
    ):
        make().get("lost")
    sys.modules.pop("shipped_gadgets", None)
