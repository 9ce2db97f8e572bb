"""The panel of the log with its keys: followed, searched, filtered by level."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.binding import BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Input

from llmtop.tui.feeds.view import LogText, RunView
from llmtop.tui.keys import LOG_KEYS, bindings
from llmtop.tui.panels.log import LogPanel
from llmtop.tui.widgets.content import Content, cell_len
from llmtop.tui.widgets.logsearch import LEVEL_WORDS, Level, following_match, marked, matches, of_level
from llmtop.tui.widgets.paint import lines
from llmtop.tui.widgets.panel import Panel


class LogArea(LogPanel, Panel):
    """Follows the end of the log until a person scrolls up; `f` follows again."""

    DEFAULT_CSS: ClassVar[str] = """
    LogArea Input { dock: bottom; height: 1; border: none; padding: 0; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings(LOG_KEYS)

    log_text: reactive[LogText | None] = reactive(None, repaint=False)
    query_text: reactive[str] = reactive("", repaint=False)
    level: reactive[Level] = reactive(Level.ALL, repaint=False)
    following: reactive[bool] = reactive(True, repaint=False)

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - Textual's own name
        super().__init__(id=id)
        self._match: int | None = None
        """Number of the line that was jumped to, counted from the log's beginning."""

    class SourceTurned(Message):
        """A person wants the next (1) or the previous (-1) log."""

        def __init__(self, by: int) -> None:
            super().__init__()
            self.by = by

    def headline(self, view: RunView) -> str | tuple[str, ...]:
        shown = self.log_text
        if shown is None or not self.zoomed:
            return super().headline(view)
        words = f"{shown.source}  {shown.total_lines} lines"
        level = f"  {LEVEL_WORDS[self.level]}" if self.level else ""
        found = f"  {self._found_words()}" if self.query_text else ""
        follow = "" if self.following else "  held"
        keys = "" if found or level else "  ← → other logs  / search  e errors  f follow"
        whole = f"{words}{level}{found}{follow}"
        return (f"{whole}{keys}", whole, f"{words}{found}", words)

    def _found_words(self) -> str:
        kept, _ = self._kept()
        found = matches(kept, self.query_text)
        at = self._shown_match()
        place = f"{found.index(at) + 1} of " if at in found else ""
        return f"/{self.query_text} {place}{len(found)}"

    def draw(self, view: RunView, width: int, height: int) -> Content:
        shown = self.log_text
        if shown is None or not shown.lines or not self.zoomed:
            return super().draw(view, width, height)
        kept, _ = self._kept()
        if not kept:
            return Content.styled(f"no line here is one of {LEVEL_WORDS[self.level]}", "$muted")
        found, current = set(matches(kept, self.query_text)), self._shown_match()
        return lines(
            [
                marked(line, self.query_text, current=at == current) if at in found else Content(line)
                for at, line in enumerate(kept)
            ]
        )

    # --- which lines ---------------------------------------------------------------------------

    def _kept(self) -> tuple[list[str], list[int]]:
        """The lines that are shown, and the number of each in the log."""
        shown = self.log_text
        if shown is None:
            return [], []
        first = shown.total_lines - len(shown.lines)
        at = of_level(shown.lines, self.level)
        return [shown.lines[line] for line in at], [first + line for line in at]

    def _shown_match(self) -> int | None:
        """The index of the match among the lines that are shown."""
        if self._match is None:
            return None
        _, numbers = self._kept()
        return numbers.index(self._match) if self._match in numbers else None

    def _row_of(self, index: int) -> int:
        """At which row of the body a line begins."""
        width = self.scrollable_content_region.width
        kept, _ = self._kept()
        return sum(1 if cell_len(line) <= width else Content(line).get_height(width) for line in kept[:index])

    def _line_at(self, row: int) -> int:
        """Which of the lines stands at a row."""
        width, at = self.scrollable_content_region.width, 0
        kept, _ = self._kept()
        for index, line in enumerate(kept):
            at += 1 if cell_len(line) <= width else Content(line).get_height(width)
            if at > row:
                return index
        return len(kept)

    # --- following -----------------------------------------------------------------------------

    def watch_zoomed(self) -> None:
        # An anchored area stays at its end until a person scrolls away from it.
        self.anchor(self.zoomed and self.following)
        super().watch_zoomed()

    def watch_log_text(self) -> None:
        self.repaint()

    def watch_level(self) -> None:
        self.repaint()

    def watch_query_text(self) -> None:
        self.repaint()

    def watch_following(self) -> None:
        self.anchor(self.zoomed and self.following)
        self.repaint()

    # --- keys ----------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Escape leaves a search first, and then the panel; the others are of the opened panel."""
        if action == "end_search":
            return bool(self.query_text) or bool(self.query(Input))
        if action in ("search", "find", "worse"):
            return self.zoomed
        return True

    def action_turn(self, by: int) -> None:
        self._match = None
        self.post_message(self.SourceTurned(by))

    def action_follow(self) -> None:
        """To the end and on with it; held where it follows already and is at its end."""
        at_end = self.scroll_offset.y >= self.max_scroll_y
        if self.following and not at_end:
            self.anchor()
        else:
            self.following = not self.following

    def action_worse(self) -> None:
        """Everything, then warnings and errors, then errors alone."""
        self.level = Level((self.level + 1) % len(Level))

    async def action_search(self) -> None:
        words = "search; ⏎ finds, Esc leaves"
        field = Input(self.query_text, placeholder=words, id="log-search", compact=True)
        await self.mount(field)
        field.focus()

    async def action_end_search(self) -> None:
        await self.query(Input).remove()
        self._match, self.query_text = None, ""
        self.focus()

    @on(Input.Submitted, "#log-search")
    async def _searched(self, event: Input.Submitted) -> None:
        event.stop()
        await self.query(Input).remove()
        self.focus()
        self._match, self.query_text = None, event.value
        if event.value and not self._jump(self._line_at(self.scroll_offset.y) - 1, 1):
            self.notify(f"no line holds {event.value!r}", markup=False)

    async def action_find(self, by: int) -> None:
        """The next match, or the one before, from the one that was found last."""
        at = self._shown_match()
        if not self.query_text:
            await self.action_search()
        elif not self._jump(self._line_at(self.scroll_offset.y) if at is None else at, by):
            self.notify(f"no line holds {self.query_text!r}", markup=False)

    def _jump(self, at: int, by: int) -> bool:
        kept, numbers = self._kept()
        line = following_match(matches(kept, self.query_text), at, by)
        if line is None:
            return False
        self._match = numbers[line]
        self.following = False
        self.repaint()
        middle = self._row_of(line) - self.scrollable_content_region.height // 2
        self.scroll_to(y=max(0, middle), animate=False, immediate=True)
        return True
