"""`llmtop calibrate`: measure this machine at a model's shapes, for the step time that `plan` tells."""

from __future__ import annotations

import argparse

import msgspec

from llmtop.presets.errors import ExitCode
from llmtop.profiler.cost.calibration import Calibration, doubts, save
from llmtop.trainer.calibrate import calibrate
from llmtop.tui.commandline import options
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    spec = options.resolve_run(args)
    found = calibrate(spec)
    path = save(spec, found)
    if args.json:
        print_json({**msgspec.to_builtins(found), "path": str(path)})
    else:
        print(calibration_text(found))
    doubtful = "; ".join(doubts(found))
    if doubtful:
        tell(f"warning: the figures may be too low, calibrate again when the machine is idle: {doubtful}")
    if spec.on_cpu and spec.world_size > 1:
        tell(
            f"note: these are figures of one process; a step of {spec.world_size} processes on a CPU is not"
            " predicted: --gpus 1, here and with plan"
        )
    tell(f"kept in {path}")
    return ExitCode.DONE


def calibration_text(found: Calibration) -> str:
    """What was measured, a figure a line."""
    figures = found.figures
    pcie = figures.pcie_bytes_per_second
    rows = (
        ("matrix products", f"{figures.matmul_flops_per_second / 1e12:.3g} TFLOP/s"),
        ("attention", f"{figures.attention_flops_per_second / 1e12:.3g} TFLOP/s"),
        ("memory", f"{figures.memory_bytes_per_second / 1e9:.3g} GB/s"),
        ("loss", f"{figures.loss_seconds_per_logit * 1e9:.3g} ns a logit"),
        ("optimizer step", f"{figures.optimizer_seconds_per_weight * 1e9:.3g} ns a weight"),
        ("host", f"{figures.launch_seconds * 1e6:.3g} us an operation"),
        ("from host memory", "n/a" if pcie is None else f"{pcie / 1e9:.3g} GB/s"),
    )
    torch = found.versions.get("torch", "n/a")
    head = f"{found.gpu}, {found.processor}: {found.took_seconds:.0f} s, torch {torch}"
    return "\n".join((head, *(f"  {name:<18} {value}" for name, value in rows)))
