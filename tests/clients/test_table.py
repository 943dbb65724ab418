"""The tables of docs/agents.md: what the tests of this directory showed, and what they set. It stands last, by the name of its file."""

from __future__ import annotations

import re
from pathlib import Path

from command_programs import PROGRAMS, described

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agents.md"
HEAD = ("client", "version", "dialect", "what was shown", "calls", "rows")
BLOCK = re.compile(r"(?<=<!-- shown by tests/clients -->\n).*?(?=<!-- end -->)", re.DOTALL)
SETTINGS = re.compile(r"(?<=<!-- set by tests/clients -->\n).*?(?=<!-- end of settings -->)", re.DOTALL)


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def test_the_documentation_has_what_was_shown(shown, skipped, processes, pytestconfig):
    page = PAGE.read_text(encoding="utf-8")
    lines = sorted(map(_line, shown), key=str.lower)
    written = BLOCK.search(page)[0].splitlines(keepends=True)[2:]
    not_run = {(case.client, case.shown) for case in skipped}
    unshown = [line for line in written if (_case(line)[0], _case(line)[2]) in not_run]
    all_ran = bool({"tests/clients", str(Path(__file__).parent)} & set(pytestconfig.args)) and not pytestconfig.option.keyword
    if pytestconfig.getoption("--write-agents-table"):
        kept = unshown if all_ran else [line for line in written if _case(line) not in set(map(_case, lines))]
        table = [_line(HEAD), "|" + "---|" * len(HEAD) + "\n", *sorted(kept + lines, key=str.lower)]
        PAGE.write_text(BLOCK.sub(lambda _: "".join(table), page), encoding="utf-8")
        return
    how = "write them with pytest tests/clients --write-agents-table"
    missing = [line for line in lines if line not in written]
    assert not missing, f"docs/agents.md lacks these lines; {how}:\n{''.join(missing)}"
    assert not all_ran or [line for line in written if line not in unshown] == lines, (
        f"docs/agents.md has lines that no test shows; {how}"
    )


def test_the_documentation_has_what_the_programs_were_given(pytestconfig):
    page, settings = PAGE.read_text(encoding="utf-8"), "\n" + "".join(map(described, PROGRAMS.values()))
    if pytestconfig.getoption("--write-agents-table"):
        page = SETTINGS.sub(lambda _: settings, page)
        PAGE.write_text(page, encoding="utf-8")
    assert SETTINGS.search(page)[0] == settings, "write them with pytest tests/clients --write-agents-table"


def _case(line: str) -> tuple[str, str, str]:
    """Client, dialect, and what was shown, without why there are several rows."""
    client, _, dialect, what, *_ = line.strip("| \n").split(" | ")
    return client, dialect, what.partition(";")[0]
