"""Samples on a terminal: the list with its filter and order, and one sample token by token."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from rich.cells import cell_len, chop_cells
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.color import Color
from textual.containers import VerticalScroll
from textual.geometry import Region, Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static

from rollwright.tracking.readable import clipped, number, share, signed, visible
from rollwright.viewer import sample_view
from rollwright.viewer.run import Run
from rollwright.viewer.search import ASKED, filters
from rollwright.viewer.terminal_parts import Table, View, line
from rollwright.viewer.transcript import chat
from rollwright.viewer.words import one_line

_LISTED = 500  # most samples in a list
_LONGEST_TASK = 32  # characters of a task and of its expected answer
_DIM = Style(dim=True)
_PLUS, _MINUS, _SCALE = Color.parse("#3987e5"), Color.parse("#e8743b"), Color.parse("#7a6ee0")


class SamplesView(View):
    """A list of samples, sorted by reward by default: those that a filter selects, or those of a group.

    Args:
        run: the run.
        asked: the filter.
        typing: start with the cursor in the filter.
        group: key of a group, to list instead.
    """

    BINDINGS: ClassVar[list[Any]] = [
        ("g", "group", "Group"),
        ("o", "turn", "Turn order"),
        Binding("slash", "search", "Search", key_display="/"),
    ]

    def __init__(self, run: Run, asked: str = "", *, typing: bool = False, group: str | None = None) -> None:
        super().__init__(lambda: run.stamp)
        self.watched, self.asked, self.typing, self.group, self.order = run, asked, typing, group, "reward"
        self.groups: dict[str, str] = {}  # key of each listed sample -> key of its group

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        if self.group is None:
            yield Input(
                self.asked, placeholder="words, step=12, reward=0..0.5, status=failed, tool=add, order=-tokens", compact=True
            )
        yield Table("sample", "step", "reward", "advantage", "tokens", "status", "task", "expected", "said")
        yield Footer()

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one(Input if self.typing else Table).focus()

    def read(self) -> Any:
        if self.group is not None:
            found = self.watched.group(self.group)
            order = sorted(found["samples"], key=lambda each: (each["reward"] is None, each["reward"] or 0.0))
            known = [each for each in order if each["reward"] is not None]
            turned = known[::-1] + order[len(known) :] if self.order == "-reward" else order
            return {**found, "samples": turned, "total": len(turned), "indexed": 1.0, "order": self.order}
        query = {"order": self.order, **filters(query_of(self.asked)), "limit": _LISTED}
        return {**self.watched.search(**query), "order": query["order"], "is_searched": "text" in query or "regex" in query}

    def show(self, found: Any) -> None:
        total, samples = found["total"], found["samples"]
        counted = f"{total:,} samples" if total is not None else f"at least {len(samples):,} samples"
        self.head(
            f"group {self.group}, {found['state']}" if self.group is not None else "",
            counted + (f", {len(samples):,} shown" if total is None or total > len(samples) else ""),
            {"reward": "lowest reward first", "-reward": "highest reward first"}.get(found["order"], f"order {found['order']}"),
            "the pattern takes long: not all were looked through" if found.get("is_cut") else "",
            "" if found["indexed"] >= 1 else f"texts indexed: {share(found['indexed'])}",
        )
        self.groups = {each["key"]: each["group"] for each in samples}
        rows = {}
        for each in samples:
            said = Text(no_wrap=True)
            shown = each["reason"] or each["answer"] or each["preview"] or ""
            for part, is_found in (each.get("snippet") if found.get("is_searched") else None) or [[shown, False]]:
                said.append_text(line(part)).stylize("bold underline" if is_found else "", len(said) - len(line(part)))
            step = "–" if each["step"] is None else str(each["step"])
            numbers = number(each["reward"]), signed(each["advantage"]), number(each["tokens"])
            task = (
                line(one_line(each["words"] or "", limit=_LONGEST_TASK)),
                line(one_line(each["expected"] or "", limit=_LONGEST_TASK)),
            )
            rows[each["key"]] = [each["key"], step, *numbers, each["status"], *task, said]
        self.query_one(Table).fill(rows)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.asked = event.value
        self.query_one(Table).focus()
        self.read_again()

    def on_data_table_row_selected(self) -> None:
        if key := self.query_one(Table).chosen:
            self.app.push_screen(SampleView(self.watched, key, list(self.groups)))

    def action_search(self) -> None:
        if self.group is None:
            self.query_one(Input).focus()

    def action_turn(self) -> None:
        self.order = "reward" if self.order == "-reward" else "-reward"
        if self.group is None:  # an order in the filter would take precedence
            self.asked = " ".join(part for part in self.asked.split() if not part.startswith("order="))
            self.query_one(Input).value = self.asked
        self.read_again()

    def action_group(self) -> None:
        if self.group is None and (key := self.query_one(Table).chosen):
            self.app.push_screen(SamplesView(self.watched, group=self.groups[key]))

    def action_up(self) -> None:
        """Leave the filter, or go one level up."""
        if isinstance(self.focused, Input):
            self.query_one(Table).focus()
        else:
            super().action_up()


def query_of(asked: str) -> dict[str, str]:
    """Parse a typed filter such as ``step=12 status=failed some words`` into the parameters of an address."""
    query, words = {}, []
    for part in asked.split():
        name, equals, value = part.partition("=")
        if equals and name in ASKED:
            query[name] = value
        else:
            words.append(part)
    return {**query, "text": " ".join(words)} if words else query


class SampleView(View):
    """One sample, token by token.

    Args:
        run: the run.
        key: key of the sample.
        keys: keys of the list that contains the sample.
    """

    BINDINGS: ClassVar[list[Any]] = [
        Binding("j", "other(1)", "Next", key_display="j k"),
        Binding("k", "other(-1)", "Previous", show=False),
        ("o", "overlay(1)", "Overlay"),
        Binding("O", "overlay(-1)", "Overlay before", show=False),
        ("v", "values", "Values"),
        ("c", "chat", "Chat"),
        Binding("r", "row", "Next row", show=False),
        ("g", "group", "Group"),
        Binding("slash", "search", "Search", key_display="/", show=False),
    ]

    def __init__(self, run: Run, key: str, keys: Sequence[str]) -> None:
        super().__init__(lambda: run.stamp)
        self.watched, self.key, self.keys, self.row, self.overlay = run, key, list(keys), 0, "advantage"
        self.has_values = bool(os.environ.get("NO_COLOR"))
        self.pointed = ""  # the sample whose point of divergence the cursor was moved to
        self.found: dict[str, Any] | None = None
        self.facts: list[Any] = []

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield Static(id="overlays", markup=False)
        yield TokenView()
        with VerticalScroll(id="chat"):
            yield Static(id="said", markup=False)
        yield Static(id="facts", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#chat").display = False
        self.watch(self.query_one(TokenView), "cursor", self.tell, init=False)

    def read(self) -> Any:
        return self.watched.sample(self.key)

    def show(self, found: Any) -> None:
        self.found, self.is_followed = found, found["status"] == "running" or found["step"] is None
        place = f"{self.keys.index(self.key) + 1} of {len(self.keys)}" if self.key in self.keys else ""
        about = [
            f"{name} {value}" for name, value in sample_view.facts(found) if value and name in ("weights", "sampled", "took")
        ]
        numbers = f"reward {number(found['reward'])}", f"advantage {signed(found['advantage'])}"
        rows = f"row {self.row + 1} of {len(found['rows'])}" if len(found["rows"]) > 1 else ""
        step = f"step {found['step']}" if found["step"] is not None else ""
        self.head(f"sample {self.key}", place, step, *numbers, found["status"], rows, *about)
        if not found["rows"]:
            self.query_one("#overlays", Static).update("No tokens were kept of it.")
            self.query_one(TokenView).show([], False)
            self.show_chat(True)
            return
        row = found["rows"][min(self.row, len(found["rows"]) - 1)]
        names = sample_view.overlays_of(row)
        self.overlay = self.overlay if self.overlay in names else names[0]
        parts = found["parts"] if self.row == 0 else None
        shown = sample_view.tokens(row, self.overlay, None, parts and parts["token"])
        text = Text()
        for name in names:
            title = sample_view.OVERLAYS[name][0]
            text.append(f"[{title}]" if name == self.overlay else f" {title} ", "bold" if name == self.overlay else "dim")
        text.append("\n" + shown["key"].replace("dotted", "italic"))  # terminals have no dots
        for shade, example in shown["scale"]:
            text.append("  ").append(f" {example} ", style_of(shade, self.background_colors[1]))
        if parts:
            text.append(f"\n▸ at token {parts['token']} it parts from {sample_view.left(parts)}, ")
            text.append(f"last from {parts['key']} (reward {number(parts['reward'])})")
        self.query_one("#overlays", Static).update(text)
        self.facts = shown["facts"]
        tokens = self.query_one(TokenView)
        tokens.show(shown["tokens"], self.has_values)
        if parts and self.pointed != self.key:
            tokens.cursor, self.pointed = parts["token"], self.key
        self.tell()
        self.show_chat(bool(self.query_one("#chat").display))

    def tell(self) -> None:
        """Show all facts about the token at the cursor."""
        index, text = self.query_one(TokenView).cursor, Text()
        if self.found and self.found["rows"] and index < len(self.facts[0][1]):
            text.append(f"#{index}", "bold")
            for name, column in self.facts:
                if column[index] is not None:
                    text.append(f"  {name} ", "dim").append(
                        line(f"“{column[index]}”" if name == "text" else number(column[index]), 60)
                    )
        self.query_one("#facts", Static).update(text)

    def show_chat(self, is_shown: bool) -> None:
        """Show the sample as a conversation, or as tokens."""
        self.query_one("#chat").display = is_shown
        self.query_one(TokenView).display = not is_shown
        (self.query_one("#chat") if is_shown else self.query_one(TokenView)).focus()
        text = Text()
        for message in chat(self.found) if self.found and is_shown else []:
            name = f" {message['name']}" if message["name"] else ""
            text.append(visible(f"── {message['role']}{name} {message['about']}".rstrip()) + "\n", "bold")
            if message["reasoning"]:
                text.append(visible(message["reasoning"]) + "\n", "dim")
            text.append(visible(message["text"]) + "\n\n", "bold red" if message["is_error"] else "")
            for card in message["cards"]:
                text.append(visible(f"── tool {card['name']} {card['about']}".rstrip()) + "\n", "bold")
                told = filter(None, [card["arguments"], card["seen"] or card["result"] or "no result"])
                text.append(visible("\n→ ".join(told)) + "\n\n", "bold red" if card["is_error"] else "")
        for attempt in self.found["attempts"] if self.found and is_shown else []:
            if attempt["traceback"] or attempt["message"]:
                text.append(f"── attempt {attempt['attempt'] + 1}, {attempt['status']}\n", "bold")
                text.append(visible(clipped(attempt["traceback"] or attempt["message"])) + "\n", "red")
        self.query_one("#said", Static).update(text)

    def action_other(self, by: int) -> None:
        place = self.keys.index(self.key) + by if self.key in self.keys else -1
        if 0 <= place < len(self.keys):
            self.key, self.row = self.keys[place], 0
            self.query_one(TokenView).cursor = 0
            self.read_again()

    def action_overlay(self, by: int) -> None:
        if self.found and self.found["rows"]:
            names = sample_view.overlays_of(self.found["rows"][self.row])
            self.overlay = names[(names.index(self.overlay) + by) % len(names)]
            self.show(self.found)

    def action_values(self) -> None:
        """Show or hide the value after each token."""
        if self.found:
            self.has_values = not self.has_values
            self.show(self.found)

    def action_row(self) -> None:
        if self.found and self.found["rows"]:
            self.row = (self.row + 1) % len(self.found["rows"])
            self.show(self.found)

    def action_chat(self) -> None:
        """Switch between conversation and tokens."""
        self.show_chat(not self.query_one("#chat").display)

    def action_group(self) -> None:
        if self.found is not None:
            self.app.push_screen(SamplesView(self.watched, group=self.found["group"]))

    def action_search(self) -> None:
        self.app.push_screen(SamplesView(self.watched, typing=True))


class TokenView(ScrollView, can_focus=True):
    """The wrapped tokens of a row, with a cursor."""

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
        ] = []  # pieces: index of the token, text, and whether it is the token's own
        self.line_of: list[int] = []
        self.has_values = False

    def show(self, tokens: list[dict[str, Any]], has_values: bool) -> None:
        """Show the tokens that ``sample_view.tokens`` returned."""
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
            if self.has_values and token["value"]:  # the value stands before the line break
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
        """Render one visible line."""
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
        """Keep the cursor visible."""
        if self.cursor < len(self.line_of):
            self.scroll_to_region(Region(0, self.line_of[self.cursor], 1, 1), animate=False)
        self.refresh()

    def action_walk(self, by: int) -> None:
        """Move the cursor by tokens."""
        self.cursor = max(0, min(len(self.tokens) - 1, self.cursor + by))

    def action_climb(self, by: int) -> None:
        """Move the cursor to the first token of another line."""
        if self.line_of:
            line_now = self.line_of[self.cursor]
            firsts = {number: index for index, number in reversed(list(enumerate(self.line_of)))}
            numbers = list(firsts)[::-1]
            self.cursor = firsts[numbers[max(0, min(len(numbers) - 1, numbers.index(line_now) + by))]]


def style_of(shade: str, background: Color, is_pointed_at: bool = False) -> Style:
    """Return the style of a token with classes of ``sample_view.tokens``: better is underlined, worse is italic."""
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
