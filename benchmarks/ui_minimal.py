"""The least that Textual can show: as many static panels as the monitor's overview, a header and a footer.

With `--ticking` a few lines of figures in each, which change once a second.
"""

from __future__ import annotations

import sys

from textual.app import App, ComposeResult
from textual.containers import Container
from textual.widgets import Footer, Static

PANELS, LINES = 8, 6


class MinimalApp(App[None]):
    CSS = """
    #panels { layout: grid; grid-size: 2 4; }
    .panel { border-top: solid grey; height: 1fr; }
    """
    BINDINGS = [("q", "quit", "Quit")]

    def compose(self) -> ComposeResult:
        yield Static("minimal")
        with Container(id="panels"):
            for number in range(PANELS):
                yield Static(f"panel {number}", classes="panel")
        yield Footer()

    def on_mount(self) -> None:
        self._ticks = 0
        if "--ticking" in sys.argv[1:]:
            self.set_interval(1.0, self._tick)

    def _tick(self) -> None:
        self._ticks += 1
        text = "\n".join(f"GPU{line} {self._ticks * 7 % 97} {self._ticks * 3 % 89}%" for line in range(LINES))
        for panel in self.query(".panel"):
            if isinstance(panel, Static):
                panel.update(text)


if __name__ == "__main__":
    MinimalApp().run()
