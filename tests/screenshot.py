"""The README's pictures: `python -m tests.screenshot FOLDER [RUN]` writes the monitor on a run, and a plan.

The app draws them itself. What is not seen is left out of them, such as fonts that a browser would fetch.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from llmtop.presets.resolve import Machine
from llmtop.profiler.record.naming import LATEST
from llmtop.profiler.record.rundir import find_run, runs_root
from llmtop.tui.screenshot import write_monitor_svg, write_plan_svg

PLANNED = "full-zero3"
PLANNED_ON = Machine(gpu="h100-80gb", gpus=8, host_memory_bytes=1 << 40)
"""A plan needs no GPU: it is the same on a laptop."""
_FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def main(folder: str, ref: str = LATEST) -> None:
    monitor, plan = Path(folder) / "monitor.svg", Path(folder) / "plan.svg"
    write_monitor_svg(find_run(runs_root(), ref), monitor, columns=100, rows=30)
    write_plan_svg(PLANNED, plan, columns=100, rows=30, machine=PLANNED_ON)
    for path in (monitor, plan):
        path.write_text(lean(path.read_text(encoding="utf-8")), encoding="utf-8")


def lean(svg: str) -> str:
    """The same picture in a third of the bytes, and without anything from another host."""
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"terminal-\d+-", "t", svg).replace("Fira Code, monospace", _FONTS)
    svg = re.sub(r'<clipPath id="tline-\d+">.*?</clipPath>', "", svg, flags=re.DOTALL)
    svg = re.sub(r' clip-path="url\(#tline-\d+\)"', "", svg)
    svg = re.sub(r"<text [^>]*>(&#160;|\s)*</text>", "", svg)
    svg = re.sub(r'="(\d+\.\d)\d+"', r'="\1"', svg).replace(' shape-rendering="crispEdges"', "")
    return re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", "\n", svg)).strip() + "\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
