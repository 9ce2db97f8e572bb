"""Pieces of a page. Whatever is put into one is escaped, unless it is markup that was made here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

DIRECTIONS = dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F), "\ufffd")
"""Characters that turn the direction of the text after them."""


class Markup(str):
    """Text that is part of the page as it is."""

    __slots__ = ()


def text(value: str) -> Markup:
    """Text as a page shows it: no tag, no attribute, no change of direction."""
    return value if isinstance(value, Markup) else Markup(escape(value.translate(DIRECTIONS)))


def joined(parts: Iterable[str]) -> Markup:
    return Markup("".join(text(part) for part in parts))


def element(name: str, *parts: str, kind: str = "") -> Markup:
    attribute = f' class="{escape(kind)}"' if kind else ""
    return Markup(f"<{name}{attribute}>{joined(parts)}</{name}>")


def section(title: str, *parts: str, anchor: str = "") -> Markup:
    """Empty where all its parts are."""
    body = joined(parts)
    if not body:
        return Markup("")
    return Markup(f'<section id="{escape(anchor)}"><h2>{text(title)}</h2>{body}</section>')


def figure(title: str, svg: str, *notes: str) -> Markup:
    """`svg` was made by `report.svg`, which escapes; empty where it is."""
    if not svg:
        return Markup("")
    return Markup(f"<figure><figcaption>{text(title)}</figcaption>{joined(notes)}{svg}</figure>")


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), kind: str = ""
) -> Markup:
    """Columns named in `right` hold numbers; empty where there is no row."""
    lines = [_row("td", row, right) for row in rows]
    if not lines:
        return Markup("")
    attribute = f' class="{escape(kind)}"' if kind else ""
    top = f"<thead>{_row('th', head, right)}</thead>" if any(head) else ""
    return Markup(f'<div class="wide"><table{attribute}>{top}<tbody>{"".join(lines)}</tbody></table></div>')


def _row(name: str, cells: Sequence[str], right: Sequence[int]) -> str:
    return (
        "<tr>"
        + "".join(
            f'<{name} class="r">{text(cell)}</{name}>' if at in right else f"<{name}>{text(cell)}</{name}>"
            for at, cell in enumerate(cells)
        )
        + "</tr>"
    )


def details(summary: str, *parts: str) -> Markup:
    """Folded away on a screen; print shows it too."""
    return Markup(f"<details><summary>{text(summary)}</summary>{joined(parts)}</details>")


_STYLE = Path(__file__).with_name("page.css")


def page(title: str, *parts: str) -> str:
    """A whole page that asks for nothing from anywhere: the policy in its head forbids it."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{_STYLE.read_text()}</style></head>"
        f"<body><main>{joined(parts)}</main></body></html>\n"
    )
