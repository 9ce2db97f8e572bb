"""The least that Textual can show: as many static panels as the monitor's overview, a header and a footer."""

from __future__ import annotations

from textual.app import App, ComposeResult
from textual.containers import Container
from textual.widgets import Footer, Static

PANELS = 8


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


if __name__ == "__main__":
    MinimalApp().run()
