"""The README's pictures: light, nothing from another host, and every word as the app drew it."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

from llmtop.tui.screenshot import write_plan_svg
from tests.screenshot import PLANNED, PLANNED_ON, lean


def words(svg: str) -> str:
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", svg)
    return "".join(unescape("".join(texts)).split())


def test_a_lean_picture_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    write_plan_svg(PLANNED, path, machine=PLANNED_ON)
    whole = path.read_text(encoding="utf-8")
    small = lean(whole)
    assert words(small) == words(whole) and "8xh100-80gb" in words(small)
    assert len(small) < 0.8 * len(whole)
    links = {link for link in re.findall(r"https?://[^\"\s)]+", small) if "w3.org" not in link}
    assert links == set()
