"""The README's picture: `python -m tests.screenshot FILE [RUN]` writes the monitor on a real run as SVG."""

from __future__ import annotations

import sys
from pathlib import Path

from llmtop.profiler.record.naming import LATEST
from llmtop.profiler.record.rundir import find_run, runs_root
from llmtop.tui.screenshot import write_monitor_svg


def main(file: str, ref: str = LATEST) -> None:
    write_monitor_svg(find_run(runs_root(), ref), Path(file), columns=120, rows=36)


if __name__ == "__main__":
    main(*sys.argv[1:])
