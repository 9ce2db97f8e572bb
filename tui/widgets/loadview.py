"""What the model of a plan needs to be loaded, at each precision."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import ModalScreen
from textual.widgets import Static

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.loading import loaded
from llmtop.tui.commands.plan_defaults import CONTEXT
from llmtop.tui.commands.plan_load import ASSUMED, best_words, fits, load_head, load_table
from llmtop.tui.keys import LOAD_KEYS, MOVE_KEYS, bindings
from llmtop.tui.widgets.asknumber import AskNumber
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.keyfooter import KeyFooter
from llmtop.tui.widgets.paint import fit, harmless, wrapped

_LEAST_CELLS = 20
_LONGEST, _MOST_REQUESTS = 1 << 20, 1 << 12
_MARKS = {None: ("?", "$text-warning"), True: ("✓", "$text-success"), False: ("✗", "$text-error")}


class LoadView(ModalScreen[None]):
    """Arrow keys double and halve the tokens of a request and the number of requests; `c` takes any."""

    HELP_TITLE: ClassVar[str] = "Load"
    BINDINGS: ClassVar[list[BindingType]] = bindings((*LOAD_KEYS, *MOVE_KEYS))

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        self._spec = spec
        self._tokens, self._requests = CONTEXT, 1

    def compose(self) -> ComposeResult:
        words = f"  load  {harmless(self._spec.model.name)}"
        yield Static(Content.assemble(("llmtop", "bold $text-primary"), words), id="search-head")
        yield Static(id="grid", markup=False)
        yield KeyFooter()

    def on_resize(self) -> None:
        self._paint()

    def action_context(self, by: int) -> None:
        self._tokens = _stepped(self._tokens, by, _LONGEST)
        self._paint()

    def action_ask_context(self) -> None:
        def answered(tokens: int | None) -> None:
            if tokens:
                self._tokens = min(_LONGEST, tokens)
                self._paint()

        words = f"Tokens of one request, prompt and answer together, up to {_LONGEST:,}."
        self.app.push_screen(AskNumber("Context length", words), answered)

    def action_requests(self, by: int) -> None:
        self._requests = _stepped(self._requests, by, _MOST_REQUESTS)
        self._paint()

    def _paint(self) -> None:
        width = max(_LEAST_CELLS, self.size.width - 2)
        found = loaded(self._spec.model, context=self._tokens, requests=self._requests)
        head, *lines = load_table(self._spec.gpu, found, width - 2)
        title = wrapped(harmless(load_head(self._spec, self._tokens, self._requests)), width)
        rows = [*map(Content, title), Content(""), Content.styled(f"  {head}", "$muted")]
        for row, line in zip(found, lines, strict=True):
            mark, style = _MARKS[fits(row, self._spec.gpu)]
            rows.append(Content.assemble((f"{mark} ", style), fit(harmless(line), width - 2).rstrip()))
        for words in (best_words(found), ASSUMED):
            rows += [Content(""), *(Content.styled(line, "$muted") for line in wrapped(words, width))]
        self.query_one("#grid", Static).update(Content("\n").join(rows), layout=False)


def _stepped(number: int, by: int, most: int) -> int:
    return min(most, number * 2) if by > 0 else max(1, number // 2)
