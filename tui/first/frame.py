"""The overview of a run as rows of styled text, laid out as `looks/theme.tcss` has the monitor.

What it says is said by the panels; only where they stand is said here a second time, and a test holds both
against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from llmtop.tui.feeds.view import LogText, RunView
from llmtop.tui.keys import APP_KEYS, MONITOR_KEYS, MOVE_KEYS, Key, changes_something, leads_here
from llmtop.tui.looks.glyphs import spelt
from llmtop.tui.offers import offers, panel_classes
from llmtop.tui.panels.components import ComponentsPanel
from llmtop.tui.panels.devices import DevicesPanel
from llmtop.tui.panels.findings import FindingsPanel
from llmtop.tui.panels.host import HostPanel
from llmtop.tui.panels.links import LinksPanel
from llmtop.tui.panels.log import LogPanel
from llmtop.tui.panels.loss import LossPanel
from llmtop.tui.panels.memory import MemoryPanel
from llmtop.tui.panels.steps import StepsPanel
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.footerkeys import FooterKey, footer, that_fit
from llmtop.tui.widgets.headrows import head_rows
from llmtop.tui.widgets.picture import Picture

_NORMAL_CELLS, _WIDE_CELLS, _TALL_ROWS = 64, 130, 18
EDGE_CELLS, _GUTTER_CELLS = 1, 2
_NORMAL_ROWS, _WIDE_ROWS = (7, 7, 4, 3), (9, 9, 6)
"""Shares of the height."""
BAR, PAGE = "$foreground on $panel", "$foreground on $background"


class _Place(NamedTuple):
    picture: Picture
    left: int
    width: int
    height: int
    """With the row of its title."""


def frame(
    view: RunView,
    log: LogText | None,
    size: tuple[int, int],
    now: float,
    *,
    read_only: bool,
    leads_to: str,
    ascii_alone: bool,
) -> list[Content] | None:
    """Each row of a terminal of so many columns and rows; None where it is none of those laid out here: a
    narrow or short terminal, a run that begins or of whose end there is much to say, a line of a panel that
    has to be wrapped."""
    width, height = size
    if width < _NORMAL_CELLS or height < _TALL_ROWS or panel_classes(view)["-starting"]:
        return None
    inner = width - 2 * EDGE_CELLS
    head = head_rows(view, inner, now, None, read_only=read_only, leads_to=leads_to)
    if height - len(head) < _TALL_ROWS // 2:
        return None
    keys = keys_of(
        MONITOR_KEYS,
        "Monitor",
        offered=lambda action: offers(action, view),
        read_only=read_only,
        ascii_alone=ascii_alone,
    )
    panels = _panels(view, log, inner, height - len(head) - 1)
    if panels is None:
        return None
    return [
        *(row_of([row], [inner], BAR) for row in head),
        *panels,
        row_of([footer(that_fit(keys, inner, "Monitor"))], [inner], BAR),
    ]


def _panels(view: RunView, log: LogText | None, inner: int, height: int) -> list[Content] | None:
    wide = inner + 2 * EDGE_CELLS >= _WIDE_CELLS
    across = 3 if wide else 2
    widths = _shared(inner - _GUTTER_CELLS * (across - 1), (1,) * across)
    heights = _shared(height, _WIDE_ROWS if wide else _NORMAL_ROWS)
    pictures = _pictures(view, log, wide=wide)
    rows: list[Content] = []
    for line, high in enumerate(heights):
        those = pictures[line * across : (line + 1) * across]
        cells = widths[: len(those) - 1]
        # The last of fewer takes what is left.
        cells = [*cells, inner - sum(cells) - _GUTTER_CELLS * len(cells)]
        columns = [_panel(view, *one, high) for one in zip(those, cells, strict=True)]
        if any(column is None for column in columns):
            return None
        told = [column for column in columns if column is not None]
        rows += [row_of([column[at] for column in told], cells, PAGE) for at in range(high)]
    return rows


def _shared(whole: int, shares: Sequence[int]) -> list[int]:
    """The whole in parts as these, each edge rounded down."""
    edges = [whole * upto // sum(shares) for upto in accumulate(shares)]
    return [end - begin for begin, end in zip([0, *edges], edges, strict=False)]


def _pictures(view: RunView, log: LogText | None, *, wide: bool) -> list[Picture]:
    newest, classes = LogPanel(), panel_classes(view)
    newest.log_text = log
    devices = [DevicesPanel()] if classes["-gpu"] and (wide or not classes["-offload"]) else []
    host = [HostPanel()] if wide or not devices else []
    return [
        *(MemoryPanel(), ComponentsPanel(), LossPanel(), StepsPanel()),
        *host,
        *devices,
        *(LinksPanel(), FindingsPanel(), newest),
    ]


def _panel(view: RunView, picture: Picture, width: int, height: int) -> list[Content] | None:
    """Its title row and its body; None where a line of it does not fit."""
    title = picture.title(view, width)
    line, style = ("━", "$primary") if isinstance(picture, MemoryPanel) else ("─", "$faint")
    rest = width - title.cell_length - 1
    body = picture.draw(view, width, height - 1).rows()[: height - 1]
    if rest < 0 or any("\t" in row.plain for row in body) or any(row.cell_length > width for row in body):
        return None
    head = Content.assemble((line, style), title, (line * rest, style))
    return [head, *body, *[Content()] * (height - 1 - len(body))]


def row_of(parts: Sequence[Content], cells: Sequence[int], style: str) -> Content:
    """One row of the terminal: each part as wide as it has place, between them and at both ends the gaps."""
    padded: list[Content | str] = []
    for part, width in zip(parts, cells, strict=True):
        padded += [part, " " * (width - part.cell_length), " " * _GUTTER_CELLS]
    row = Content.assemble(" " * EDGE_CELLS, *padded[:-1], " " * EDGE_CELLS)
    return Content(row.plain, ((0, len(row.plain), style), *row.spans))


def keys_of(
    keys: Sequence[Key],
    title: str,
    *,
    offered: Callable[[str], bool] = lambda _: True,
    read_only: bool,
    ascii_alone: bool,
) -> list[FooterKey]:
    """Of a screen of that title, as the app has them: the screen's come before its own, and of several with
    one action the first."""
    by_key = {
        key.key: key
        for key in reversed((*keys, *APP_KEYS, *MOVE_KEYS))
        if offered(key.action) and not (read_only and changes_something(key.action.partition("(")[0]))
    }
    found: dict[str, FooterKey] = {}
    for key in (*keys, *APP_KEYS):
        if by_key.get(key.key) is key and key.footer and not leads_here(key.action, title):
            written = key.display or key.key
            display = spelt(written) if ascii_alone else written
            found.setdefault(key.action, FooterKey(key.key, display, key.label, key.action, enabled=True))
    return list(found.values())
