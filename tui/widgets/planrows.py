"""The list of everything that a plan can set: one row an option, with its value and where it came from."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from llmtop.presets.spec import Provenance, RunSpec, ValueSource
from llmtop.tui.commandline.options import GROUPS
from llmtop.tui.plans.planning import EDITED, RAW, RECIPE, Plan, shown
from llmtop.tui.widgets.content import Content, cell_len
from llmtop.tui.widgets.paint import fit, harmless

HELP: dict[str, str] = {
    RECIPE: "a named set of options; what is edited here wins over it",
    **{row.key: row.help for group in GROUPS for row in group.rows},
    RAW: "raw DeepSpeed keys, as zero_optimization.reduce_bucket_size=2e8; they win over all else",
}
"""Option name to its help, in the order of the list."""

_LABEL_CELLS = 24
_VALUE_CELLS, _SOURCE_CELLS = 16, 12
"""With room for both, a row tells its source too."""
_MARKS: dict[ValueSource, str] = {
    ValueSource.DEFAULT: " ",
    ValueSource.RECIPE: "·",
    ValueSource.DEEPSPEED_CONFIG: "d",
    ValueSource.COMMAND_LINE: "*",
    ValueSource.MACHINE: "m",
}


class PlanRows(OptionList):
    """Shows a plan; a row is painted again only when its text has changed. Its cursor stops at the ends."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select", "Edit", key_display="⏎")]

    def __init__(self) -> None:
        super().__init__(*_options(), markup=False, id="options")
        self._painted: dict[str, Content] = {}
        self._plan: Plan | None = None
        self._last_spec: RunSpec | None = None

    @property
    def key(self) -> str:
        """Of the row under the cursor."""
        option = self.highlighted_option
        return option.id if option is not None and option.id is not None else RECIPE

    def action_cursor_up(self) -> None:
        if self.highlighted != self._ends[0]:
            super().action_cursor_up()

    def action_cursor_down(self) -> None:
        if self.highlighted != self._ends[1]:
            super().action_cursor_down()

    @property
    def _ends(self) -> tuple[int, int]:
        """The first and the last row that the cursor can be on."""
        free = [at for at, option in enumerate(self.options) if not option.disabled]
        return free[0], free[-1]

    def show(self, plan: Plan, last_spec: RunSpec | None) -> None:
        """Bring every row to `plan`; `last_spec` fills in where the plan has an error."""
        self._plan, self._last_spec = plan, last_spec
        self.repaint()

    def on_resize(self) -> None:
        self.repaint()
        # The help and the editor below take rows away, which must not hide the one under the cursor.
        self.call_after_refresh(self.scroll_to_highlight)

    def repaint(self) -> None:
        width = self.scrollable_content_region.width
        if self._plan is None or width <= 0:
            return
        for key in HELP:
            prompt = self._prompt(self._plan, key, width)
            before = self._painted.get(key)
            if before is None or before != prompt:
                self._painted[key] = prompt
                self.replace_option_prompt(key, prompt)

    def _prompt(self, plan: Plan, key: str, width: int) -> Content:
        value = harmless(shown(key, plan, self._last_spec))
        mark = _mark(plan, self._last_spec, key)
        colour = {"*": "$text-accent", "✗": "$text-error"}.get(mark)
        style = f"bold {colour}" if colour else "$foreground"
        room = max(4, width - _LABEL_CELLS - 2)
        source = harmless(source_words(plan, self._last_spec, key, brief=True))
        if room < _VALUE_CELLS + _SOURCE_CELLS or cell_len(value) >= _VALUE_CELLS:
            cells, source = room, ""
        else:
            cells = _VALUE_CELLS
        return Content.assemble(
            (f"{mark} ", colour or "$muted"),
            (fit(key, _LABEL_CELLS), "$muted"),
            (fit(value, cells), style),
            (fit(source, room - cells), "$muted"),
        )


def _mark(plan: Plan, last_spec: RunSpec | None, key: str) -> str:
    if key == RECIPE:
        return " "
    if any(name.split(".")[0] == key for name in plan.wrong):
        return "✗"
    if any(name.split(".")[0] == key for name in plan.draft.edits):
        return "*"
    came_from = _origin(plan, last_spec, key)
    # An edit that was taken back while another one stands in the way of the plan is none any more.
    return _MARKS[came_from.source] if came_from is not None and came_from.detail != EDITED else " "


def _origin(plan: Plan, last_spec: RunSpec | None, key: str) -> Provenance | None:
    """As long as a plan is not valid, that of the values which are still shown."""
    spec = plan.spec or last_spec
    return spec.provenance.get(key) if spec is not None else None


def source_words(plan: Plan, last_spec: RunSpec | None, key: str, *, brief: bool = False) -> str:
    """Where the value of a row came from; `brief`: without what can be done about it."""
    if any(name.split(".")[0] == key for name in plan.wrong):
        return "cannot be taken" + ("" if brief else "; backspace takes it back")
    came_from = _origin(plan, last_spec, key)
    if came_from is None:
        return ""
    if came_from.detail == EDITED:
        return "edited here" + ("" if brief else "; backspace takes it back")
    detail = came_from.detail.rsplit("/", 1)[-1]
    if brief:
        return "this machine" if came_from.source is ValueSource.MACHINE else detail or str(came_from.source)
    return f"from {came_from.source}" + (f": {detail}" if detail else "")


def _options() -> list[Option]:
    """Group titles, which the cursor passes over, and a row for each option."""
    rows = [Option(RECIPE, id=RECIPE)]
    for group in GROUPS:
        rows.append(Option(Content.styled(group.title, "bold $text-primary"), disabled=True))
        rows += [Option(row.key, id=row.key) for row in group.rows]
    return [*rows, Option(RAW, id=RAW)]
