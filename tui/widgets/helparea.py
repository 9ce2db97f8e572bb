"""The words below the options of a plan."""

from __future__ import annotations

from textual.message import Message
from textual.widgets import Static


class HelpArea(Static):
    """Help of one option; low while something is edited."""

    class Resized(Message):
        """There is room for more words, or for fewer."""

    def on_resize(self) -> None:
        self.post_message(self.Resized())
