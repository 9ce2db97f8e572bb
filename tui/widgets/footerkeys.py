"""What the footer says: each key with a word, as many as fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmtop.tui.keys import of_least_use
from llmtop.tui.widgets.content import Content, cell_len


class FooterKey(NamedTuple):
    """One key, and what it does in a word."""

    key: str
    display: str
    word: str
    action: str
    enabled: bool

    @property
    def cells(self) -> int:
        """With its word, and the space after it."""
        return cell_len(f"{self.display} {self.word}".strip()) + 1


def that_fit(keys: Sequence[FooterKey], width: int, title: str) -> tuple[FooterKey, ...]:
    """Of the screen of that title in the help, without those of least use."""
    shown = list(keys)
    while sum(key.cells for key in shown) > width:
        dropped = of_least_use([key.action for key in shown], title)
        if dropped is None:
            break
        shown = [key for key in shown if key.action != dropped]
    return tuple(shown)


def footer(keys: Sequence[FooterKey]) -> Content:
    return Content("").join([part for key in keys for part in _written(key)])


def _written(key: FooterKey) -> tuple[Content, ...]:
    dim = "" if key.enabled else "dim "
    word = Content.styled(f" {key.word}", f"{dim}$footer-description-foreground") if key.word else Content("")
    return Content.styled(key.display, f"{dim}bold $footer-key-foreground"), word, Content(" ")
