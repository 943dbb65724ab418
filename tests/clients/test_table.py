"""The table of docs/agents.md is what the tests of this directory showed. It stands last, by the name of its file."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agents.md"
HEAD = ("client", "version", "dialect", "what was shown", "calls", "rows")
BLOCK = re.compile(r"(?<=<!-- shown by tests/clients -->\n).*?(?=<!-- end -->)", re.DOTALL)


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def test_the_documentation_has_what_was_shown(shown, processes, pytestconfig):
    page = PAGE.read_text(encoding="utf-8")
    lines = sorted(map(_line, shown), key=str.lower)
    written = BLOCK.search(page)[0].splitlines(keepends=True)[2:]
    all_ran = bool({"tests/clients", str(Path(__file__).parent)} & set(pytestconfig.args)) and not pytestconfig.option.keyword
    if pytestconfig.getoption("--write-agents-table"):
        kept = [] if all_ran else [line for line in written if _case(line) not in set(map(_case, lines))]
        table = [_line(HEAD), "|" + "---|" * len(HEAD) + "\n", *sorted(kept + lines, key=str.lower)]
        PAGE.write_text(BLOCK.sub(lambda _: "".join(table), page), encoding="utf-8")
        return
    how = "write them with pytest tests/clients --write-agents-table"
    missing = [line for line in lines if line not in written]
    assert not missing, f"docs/agents.md lacks these lines; {how}:\n{''.join(missing)}"
    assert not all_ran or written == lines, f"docs/agents.md has lines that no test shows; {how}"


def _case(line: str) -> tuple[str, str, str]:
    """Client, dialect, and what was shown, without why there are several rows."""
    client, _, dialect, what, *_ = line.strip("| \n").split(" | ")
    return client, dialect, what.partition(";")[0]
