"""`llmtop doctor`: what this machine has, what is missing, what would break and how to mend it."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import get_args

import msgspec

from llmtop.presets.errors import ExitCode
from llmtop.profiler.hardware.costs import CallCost
from llmtop.profiler.record.deviceevents import Topology
from llmtop.tui.commands.output import print_json, text_width, wrapped
from llmtop.tui.doctor import gpus, software, system
from llmtop.tui.doctor.check import Check, Status


class Doctor(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `doctor --json`."""

    schema_version: int = 1
    checks: tuple[Check, ...]
    topology: Topology = Topology()
    """How the GPUs are connected."""
    nvml_calls: tuple[CallCost, ...] = ()
    """What reading each GPU takes, the dearest first; those above a millisecond are on the slow clock."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    machine = software.look_at_machine()
    # Whoever does not answer one question is not asked the others.
    look = gpus.GpuLook() if machine.driver_silent else gpus.look_at_gpus()
    checks = [*software.software_checks(machine), *look.checks]
    checks += [check(machine) for check in system.CHECKS]
    if args.json:
        print_json(Doctor(checks=tuple(checks), topology=look.topology, nvml_calls=look.call_costs))
        return ExitCode.DONE
    width = max(len(check.name) for check in checks)
    columns = text_width()
    for check in checks:
        print("\n".join(wrapped(check.found, f"{check.status:<10}{check.name:<{width}}  ", columns)))
        if check.mend:
            print("\n".join(wrapped(f"mend: {check.mend}", f"{'':<10}{'':<{width}}  ", columns)))
    if look.topology.devices:
        print("\n".join(["", *gpus.matrix_lines(look.topology), ""]))
    counts = Counter(check.status for check in checks)
    print(", ".join(f"{counts[status]} {status}" for status in get_args(Status) if counts[status]))
    if counts["missing"]:
        print("missing: needed to train here; plan, attach, report and the app do without")
    if counts["optional"]:
        print("optional: not there, and needed only for what its line says")
    return ExitCode.DONE
