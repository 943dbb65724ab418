"""The tokens of a row on a terminal, with an overlay and a cursor."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.cells import cell_len, chop_cells
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding
from textual.color import Color
from textual.geometry import Region, Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

_DIM = Style(dim=True)
_PLUS, _MINUS, _SCALE = Color.parse("#3987e5"), Color.parse("#e8743b"), Color.parse("#7a6ee0")


class Tokens(ScrollView, can_focus=True):
    """The tokens of a row, wrapped, with one that is pointed at."""

    BINDINGS: ClassVar[list[Any]] = [
        Binding("left", "walk(-1)", "Token", key_display="←→"),
        Binding("right", "walk(1)", "Next token", show=False),
        Binding("up", "climb(-1)", "Line above", show=False),
        Binding("down", "climb(1)", "Line below", show=False),
        Binding("pageup", "climb(-10)", "Ten lines up", show=False),
        Binding("pagedown", "climb(10)", "Ten lines down", show=False),
        Binding("home", "walk(-1000000000)", "First token", show=False),
        Binding("end", "walk(1000000000)", "Last token", show=False),
    ]
    cursor = reactive(0)

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[dict[str, Any]] = []
        self.lines: list[
            list[tuple[int, str, bool]]
        ] = []  # of each piece: its token, its text, whether the text is the token's
        self.line_of: list[int] = []
        self.has_values = False

    def show(self, tokens: list[dict[str, Any]], has_values: bool) -> None:
        """Show the tokens of ``sample_view.tokens``."""
        self.tokens, self.has_values = tokens, has_values
        self.cursor = max(0, min(self.cursor, len(tokens) - 1))
        self.lay_out()

    def lay_out(self) -> None:
        """Wrap the tokens into lines."""
        width = max(8, self.scrollable_content_region.width)
        self.lines, self.line_of, used = [[]], [], 0
        for index, token in enumerate(self.tokens):
            pieces = [(f"[v{token['from']}]", False)] if token["from"] is not None else []
            pieces += [(part, True) for part in token["text"].splitlines(keepends=True)]
            if self.has_values and token["value"]:  # it stands before the end of the line
                last, is_broken = pieces[-1][0], pieces[-1][0].endswith("\n")
                pieces[-1] = last.rstrip("\n"), True
                pieces.append((f"‹{token['value']}›" + "\n" * is_broken, False))
            if used and used + sum(cell_len(text.rstrip("\n")) for text, _ in pieces) > width:
                self.lines.append([])
                used = 0
            self.line_of.append(len(self.lines) - 1)
            for text, is_own in pieces:
                for part in chop_cells(text.rstrip("\n"), width):
                    if used and used + cell_len(part) > width:
                        self.lines.append([])
                        used = 0
                    self.lines[-1].append((index, part, is_own))
                    used += cell_len(part)
                if text.endswith("\n"):
                    self.lines.append([])
                    used = 0
        self.virtual_size = Size(width, len(self.lines))
        self.refresh()

    def on_resize(self) -> None:
        self.lay_out()

    def render_line(self, y: int) -> Strip:
        """A line as it is seen."""
        number_of_line = y + self.scroll_offset.y
        pieces = self.lines[number_of_line] if number_of_line < len(self.lines) else []
        segments = [
            Segment(
                text, style_of(self.tokens[index]["shade"], self.background_colors[1], index == self.cursor) if is_own else _DIM
            )
            for index, text, is_own in pieces
        ]
        return Strip(segments).extend_cell_length(self.size.width).apply_style(self.rich_style)

    def watch_cursor(self) -> None:
        """Keep it in sight."""
        if self.cursor < len(self.line_of):
            self.scroll_to_region(Region(0, self.line_of[self.cursor], 1, 1), animate=False)
        self.refresh()

    def action_walk(self, by: int) -> None:
        """Point at another token."""
        self.cursor = max(0, min(len(self.tokens) - 1, self.cursor + by))

    def action_climb(self, by: int) -> None:
        """Point at the first token of another line."""
        if self.line_of:
            line_now = self.line_of[self.cursor]
            firsts = {number: index for index, number in reversed(list(enumerate(self.line_of)))}
            numbers = list(firsts)[::-1]
            self.cursor = firsts[numbers[max(0, min(len(numbers) - 1, numbers.index(line_now) + by))]]


def style_of(shade: str, background: Color, is_pointed_at: bool = False) -> Style:
    """How a token of the classes of ``sample_view.tokens`` looks: better is underlined, worse is italic."""
    style = Style(reverse=True, bold=True) if is_pointed_at else Style()
    for name in shade.split():
        if name in ("plus", "trained"):
            style += Style(underline=True)
        elif name == "minus":
            style += Style(italic=True)
        elif name == "special":
            style += Style(bold=True)
        elif name[0] in "pnq" and name[1:].isdecimal():
            color = {"p": _PLUS, "n": _MINUS, "q": _SCALE}[name[0]]
            style += Style(bgcolor=background.blend(color, int(name[1:]) / (8 if name[0] == "q" else 7)).rich_color)
    return style
