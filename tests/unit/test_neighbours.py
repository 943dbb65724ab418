"""Modules beside a plugin file, which it imports by their names."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from rollwright import AsyncRewardWrapper
from rollwright.errors import ConfigError
from rollwright.neighbours import NEIGHBOURS
from rollwright.registry import PLUGIN_VARIABLE, Plugins
from rollwright.workflows.registry import FUNCTIONS


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """``plugins({"a/file.py": text, …}, "a/file.py", …)`` writes the files and loads those as plugins."""
    monkeypatch.setenv(PLUGIN_VARIABLE, "")
    monkeypatch.setattr(NEIGHBOURS, "directories", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules, functions, loaded = set(sys.modules), set(FUNCTIONS), Plugins()

    def load(files, *sources):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        for source in sources:
            loaded.add(source, relative_to=tmp_path)
            loaded.load()

    yield load
    os.environ[PLUGIN_VARIABLE] = ""
    for name in set(FUNCTIONS) - functions:
        del FUNCTIONS[name]
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")) or name.startswith("nb_"):
            del sys.modules[name]


def registered(name, *lines):
    return "\n".join(
        ["from rollwright.workflows.registry import FUNCTIONS", *lines, f"@FUNCTIONS.register('{name}')", f"def {name}():"]
    )


def test_a_plugin_imports_what_is_beside_it(plugins):
    path = list(sys.path)
    plugins(
        {
            "w/a.py": registered("nb_f", "import nb_one", "from nb_pack.deep import two")
            + "\n    from nb_late import three\n    return nb_one.one() + two() + three()\n",
            "w/nb_one.py": "import nb_other\ndef one():\n    return nb_other.ONE\n",
            "w/nb_other.py": "import nb_one\nONE = 1\n",
            "w/nb_pack/deep.py": "import nb_other\ndef two():\n    return 2 * nb_other.ONE\n",
            "w/nb_late.py": "def three():\n    return 3\n",
            "w/nb_unused.py": "",
        },
        "w/a.py",
    )
    assert FUNCTIONS.get("nb_f")() == 6
    assert sys.path == path
    with pytest.raises(ModuleNotFoundError):  # nothing imports it
        __import__("nb_unused")


def test_a_neighbour_that_is_a_plugin_registers_its_entries_once(plugins):
    first = registered("nb_first", "import nb_zero") + "\n    return nb_zero.nb_zero() + 1\n"
    second = registered("nb_second", "import nb_zero") + "\n    return nb_zero.nb_zero() + 2\n"
    plugins(
        {"w/a.py": first, "w/nb_zero.py": registered("nb_zero", "import a") + "\n    return 0\n", "w/z.py": second},
        "w/nb_zero.py",  # it is a plugin first, then a neighbour
        "w",
    )
    assert [FUNCTIONS.get(name)() for name in ("nb_zero", "nb_first", "nb_second")] == [0, 1, 2]


def test_two_directories_with_a_module_of_one_name_are_not_confused(plugins, tmp_path, monkeypatch):
    plugin = registered("nb_{}", "import nb_helper") + "\n    return nb_helper.NAME\n"
    files = {f"{name}/w/plugin.py": plugin.replace("{}", name) for name in ("a", "b", "c")}
    files |= {f"{name}/w/nb_helper.py": f"NAME = '{name}'\n" for name in ("a", "b")}
    plugins(files, "a/w/plugin.py")
    beside, other = tmp_path / "b/w/nb_helper.py", tmp_path / "a/w/nb_helper.py"
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=rf"b/w/plugin.py, line 2: import nb_helper is ambiguous: {beside} .*, but .* is {other}; rename"
        ):
            plugins({}, "b/w/plugin.py")
    os.environ[PLUGIN_VARIABLE] = ""
    plugins({}, "c/w/plugin.py")  # no other module beside it: this is the one that is loaded
    assert (FUNCTIONS.get("nb_a")(), FUNCTIONS.get("nb_c")()) == ("a", "a")
    assert FUNCTIONS.get("nb_a").__module__ != FUNCTIONS.get("nb_c").__module__  # both files are w/plugin.py

    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    plugins({"elsewhere/nb_found.py": "", "d/nb_found.py": "", "d/plugin.py": "import nb_found\n"})
    with pytest.raises(ConfigError, match=rf"d/plugin.py, line 1: .*{tmp_path}/elsewhere/nb_found.py; rename"):
        plugins({}, "d/plugin.py")


def test_modules_of_python_and_of_packages_come_first(plugins):
    broken = "raise RuntimeError('not this one')\n"
    plugins(
        {"w/a.py": "import calendar\nimport yaml\nyaml.safe_load\n", "w/calendar.py": broken, "w/yaml/__init__.py": broken},
        "w/a.py",
    )


def test_a_missing_neighbour_and_one_that_cannot_be_read_are_named(plugins):
    with pytest.raises(ConfigError, match=r"No module named 'nb_gone'; .*put it beside the plugin"):
        plugins({"w/a.py": "import nb_gone\n"}, "w/a.py")
    os.environ[PLUGIN_VARIABLE] = ""
    with pytest.raises(ConfigError, match=r"plugin .*w/b\.py cannot be imported: SyntaxError: .*nb_wrong\.py"):
        plugins({"w/b.py": "import nb_wrong\n", "w/nb_wrong.py": "def\n"}, "w/b.py")


def known_reward(prompt, completion, prompt_ids, completion_ids):
    return float(len(completion))


def test_a_reward_in_a_worker_process_imports_what_is_beside_its_plugin(plugins):
    assert asyncio.run(AsyncRewardWrapper(known_reward)("p", "abc", [], [])) == 3.0  # the process has started before
    plugins(
        {
            "w/a.py": "from rollwright.workflows.registry import FUNCTIONS\nfrom nb_length import length\n@FUNCTIONS.register('nb_score')\n"
            "def score(prompt, completion, prompt_ids, completion_ids):\n    from nb_bonus import BONUS\n    return length(completion) + BONUS\n",
            "w/nb_length.py": "def length(text):\n    return len(text)\n",
            "w/nb_bonus.py": "BONUS = 5.0\n",
        },
        "w/a.py",
    )
    assert asyncio.run(AsyncRewardWrapper(FUNCTIONS.get("nb_score"))("p", "ab", [], [])) == 7.0
