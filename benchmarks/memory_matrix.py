"""Predicted against measured memory over many configurations, each in a fresh run of the product.

    python benchmarks/memory_matrix.py CELLS.jsonl --out RESULTS.jsonl [--jobs N] [--minutes M]

CELLS holds one JSON object of run options a line. A cell that RESULTS already has is skipped, so an
interrupted matrix goes on where it stopped. With several jobs the device readings mix, so NVML figures
are kept only with one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llmtop.presets.errors import LlmtopError
from llmtop.presets.resolve import Layer, resolve
from llmtop.presets.spec import ValueSource
from llmtop.profiler.feed import read_state
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.rundir import RunDir
from llmtop.profiler.runstate import RunState
from llmtop.trainer.control import wait_for_end
from llmtop.trainer.launch import start_run

CELL_SECONDS = 300.0


def run_cell(cell: dict[str, Any], root: Path, *, alone: bool) -> dict[str, Any]:
    """Run one configuration to its end and put predicted and measured figures side by side."""
    values = {"steps": 4, "classify_every": 2, **cell}
    began = time.monotonic()
    try:
        layer = Layer(source=ValueSource.COMMAND_LINE, detail="cell", values=values)
        spec = resolve([layer], name="matrix", machine=detect_machine())
        prediction = predict(spec)
        run = start_run(spec, prediction, root=root)
        wait_for_end(run, CELL_SECONDS)
    except LlmtopError as error:
        return {"cell": cell, "refused": str(error)}
    state = read_state(run)
    return {
        "cell": cell,
        "status": state.status,
        "reason": state.ended.reason if state.ended else None,
        "wall_seconds": round(time.monotonic() - began, 1),
        "predicted": {
            "peak_allocated_bytes": prediction.peak_allocated_bytes,
            "peak_allocated_upper_bytes": prediction.peak_allocated_upper_bytes,
            "peak_device_bytes": prediction.peak_device_bytes,
            "host_bytes": prediction.host_bytes,
            "step_seconds": prediction.step_seconds,
            "moments": {moment.name: moment.components for moment in prediction.moments},
        },
        "measured": measured(run, state, alone=alone),
    }


def measured(run: RunDir, state: RunState, *, alone: bool) -> dict[str, Any]:
    ranks: list[dict[str, Any]] = []
    for rank, seen in sorted(state.ranks.items()):
        last = seen.last_step
        ranks.append(
            {
                "rank": rank,
                "peaks": {
                    phase: [memory.allocated_bytes, memory.peak_bytes, memory.reserved_bytes]
                    for phase, memory in (last.phase_memory if last else {}).items()
                },
                "largest": {phase: memory.peak_bytes for phase, memory in seen.peaks.items()},
                "classified": {
                    moment: [event.components, event.total_bytes, event.host_components]
                    for moment, event in seen.classified.items()
                },
                "step_seconds": last.step_seconds if last else None,
                "phase_seconds": last.phase_seconds if last else None,
                "loss": last.loss if last else None,
                "model": [
                    seen.model.params,
                    seen.model.trainable_params,
                    seen.model.optimizer,
                    seen.model.engine_optimizer,
                    seen.model.attention,
                    list(seen.model.liger),
                ]
                if seen.model
                else None,
                "stages": {stage.stage: stage.seconds for stage in seen.stages},
                "failed": [seen.failed.error_type, seen.failed.message[:600]] if seen.failed else None,
            }
        )
    return {
        "ranks": ranks,
        "device_bytes": state.peak_device_bytes if alone else None,
        "pss_bytes": state.peak_pss_bytes,
        "log_tail": "" if state.status == "completed" else _tail(run.log_path(0)),
    }


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:] if log.exists() else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cells", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=9.0, help="start no cell after this long")
    options = parser.parse_args()
    cells = [json.loads(line) for line in options.cells.read_text().splitlines() if line.strip()]
    done = set()
    if options.out.exists():
        done = {json.dumps(json.loads(line)["cell"]) for line in options.out.read_text().splitlines()}
    deadline = time.monotonic() + 60 * options.minutes
    root = Path(tempfile.mkdtemp(prefix="llmtop-matrix-"))

    def work(cell: dict[str, Any]) -> None:
        if json.dumps(cell) in done or time.monotonic() > deadline:
            return
        row = run_cell(cell, root, alone=options.jobs == 1)
        with options.out.open("a") as log:
            log.write(json.dumps(row) + "\n")
        print(row.get("status") or "refused", json.dumps(cell), row.get("reason") or "", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, cells))


if __name__ == "__main__":
    main()
