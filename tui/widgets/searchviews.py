"""Views of many candidates over the plan: a grid of micro-batch and ZeRO stage, and which GPUs would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from llmtop.profiler.cost.sweep import Change
from llmtop.profiler.cost.where import Where, WhereRow
from llmtop.tui.commands.plan_search import WHERE_NOTES, nowhere_words, searched_words, where_lines
from llmtop.tui.keys import MOVE_KEYS, SEARCH_KEYS, bindings
from llmtop.tui.plans.grid import STAGES, Grid, Place, detail_rows, grid_rows, legend, place_at
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.keyfooter import KeyFooter
from llmtop.tui.widgets.paint import fit, harmless, wrapped

_LEAST_CELLS = 20


class SearchView(ModalScreen[Change | None]):
    """Ends with the change that was taken, or None."""

    HELP_TITLE: ClassVar[str] = "Sweep and where"
    BINDINGS: ClassVar[list[BindingType]] = bindings((*SEARCH_KEYS, *MOVE_KEYS))

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def compose(self) -> ComposeResult:
        yield Static(Content.assemble(("llmtop", "bold $text-primary"), f"  {self._title}"), id="search-head")
        yield from self.body()
        yield KeyFooter()

    def body(self) -> ComposeResult:
        raise NotImplementedError

    @property
    def _cells(self) -> int:
        return max(_LEAST_CELLS, self.size.width - 2)

    def _say(self, text: str) -> None:
        self.app.clear_notifications()
        self.notify(harmless(text), severity="warning", timeout=5, markup=False)


class GridBody(Static, can_focus=True):
    """Painted by its screen, which also moves the cursor."""

    class Pointed(Message):
        """The mouse was pressed over it."""

        def __init__(self, x: int, y: int) -> None:
            super().__init__()
            self.x = x
            self.y = y

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        if at is not None:
            self.post_message(self.Pointed(at.x, at.y))


class SweepView(SearchView):
    """Arrow keys move a cursor over the grid."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("up", "move(-1, 0)", ""),
        ("down", "move(1, 0)", ""),
        ("left", "move(0, -1)", ""),
        ("right", "move(0, 1)", ""),
        ("home", "move(-99, 0)", ""),
        ("end", "move(99, 0)", ""),
    ]

    def __init__(self, grid: Grid, title: str) -> None:
        super().__init__(f"sweep  {harmless(title)}")
        self._grid = grid
        self.cursor: Place = grid.own

    def body(self) -> ComposeResult:
        yield GridBody(id="grid", markup=False)

    def on_mount(self) -> None:
        self.query_one(GridBody).focus()

    def on_resize(self) -> None:
        self._paint()

    def _paint(self) -> None:
        width = self._cells
        rows = [*grid_rows(self._grid, self.cursor, width), Content("")]
        rows += detail_rows(self._grid, self.cursor, width)
        rows += [Content(""), *(Content.styled(line, "$muted") for line in wrapped(legend(), width))]
        self.query_one(GridBody).update(Content("\n").join(rows), layout=False)

    def action_move(self, down: int, right: int) -> None:
        row, stage = self.cursor
        last = len(self._grid.micro_batches) - 1
        self.cursor = min(last, max(0, row + down)), min(STAGES[-1], max(0, stage + right))
        self._paint()

    def on_grid_body_pointed(self, message: GridBody.Pointed) -> None:
        """The first press puts the cursor there, the second one takes the cell."""
        place = place_at(self._grid, message.x, message.y, self._cells)
        if place is None:
            return
        if place == self.cursor:
            self.action_take()
        else:
            self.cursor = place
            self._paint()

    def action_take(self) -> None:
        cell = self._grid.cells[self.cursor]
        if cell.row is None:
            self._say(f"It cannot run: {cell.why}")
        else:
            self.dismiss(cell.change)


class WhereFound(Message):
    """The search has ended."""

    def __init__(self, found: Where) -> None:
        super().__init__()
        self.found = found


class TakeList(OptionList):
    """Whose Enter stands in the footer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select", "Take it", key_display="⏎")]


class WhereView(SearchView):
    """A row for each kind of GPU; the search runs beside the screen."""

    def __init__(self, search: Callable[[], Where], title: str, note: str = "") -> None:
        """`note`: what else is to be known of the run that is searched for."""
        super().__init__(f"where  {harmless(title)}")
        self._search = search
        self._note = note
        self.found: Where | None = None

    @property
    def settled(self) -> bool:
        return self.found is not None

    def body(self) -> ComposeResult:
        yield Static("searching", id="where-top", markup=False)
        yield TakeList(id="where-rows", markup=False)
        yield Static("", id="where-notes", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._look()

    @work(thread=True, exclusive=True)
    def _look(self) -> None:
        self.post_message(WhereFound(self._search()))

    def on_where_found(self, message: WhereFound) -> None:
        self.found = message.found
        self._show()

    def on_resize(self) -> None:
        if self.found is not None:
            self._show()

    def _show(self) -> None:
        if self.found is None:
            return
        width, rows = self._cells - 1, self.found.rows
        fitting = [row for row in rows if row.gpus is not None]
        lines = where_lines(fitting, width) if fitting else None
        head = Content.styled(fit(lines.head, width).rstrip() if lines else "it fits nowhere", "$muted")
        said = [*wrapped(searched_words(self.found), width)]
        said += wrapped(self._note, width) if self._note else []
        searched = [Content.styled(line, "$muted") for line in said]
        self.query_one("#where-top", Static).update(Content("\n").join([*searched, Content(""), head]))
        listed = self.query_one(OptionList)
        at = listed.highlighted
        listed.clear_options()
        options = [
            Option(fit(text, width).rstrip(), id=str(i)) for i, text in enumerate(lines.rows if lines else ())
        ]
        options += [Option(self._nowhere(row, width), disabled=True) for row in rows if row.gpus is None]
        listed.add_options(options)
        listed.highlighted = (at or 0) if lines else None
        notes = [lines.same] if lines and lines.same else []
        notes += wrapped(WHERE_NOTES, width) if lines else []
        self.query_one("#where-notes", Static).update(Content.styled("\n".join(notes), "$muted"))

    def _nowhere(self, row: WhereRow, width: int) -> Content:
        name = fit(row.gpu, 11)
        first, *more = wrapped(f"✗ {nowhere_words(row, brief=True)}", width - len(name))
        return Content.assemble((name, "$muted"), first, *(f"\n{' ' * len(name)}{line}" for line in more))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._take(event.option_id)

    def action_take(self) -> None:
        """Enter reaches the list first; here only where there is nothing in it that can be taken."""
        self._say("There is nothing to take.")

    def _take(self, option_id: str | None) -> None:
        if self.found is None or option_id is None:
            return
        row = self.found.rows[int(option_id)]
        change: dict[str, Any] = {"gpu": row.gpu, "nodes": row.nodes, **row.settings}
        self.dismiss(change)
