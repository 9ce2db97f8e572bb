"""`llmtop doctor`: what this machine has, what is missing, what would break and how to mend it."""

from __future__ import annotations

import argparse

import msgspec

from llmtop.presets.errors import ExitCode
from llmtop.tui.commands.output import print_json
from llmtop.tui.doctor import software, system
from llmtop.tui.doctor.check import Check


class Doctor(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `doctor --json`."""

    schema_version: int = 1
    checks: tuple[Check, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    machine = software.look_at_machine()
    checks = [*software.software_checks(machine)]
    checks += [check(machine) for check in system.CHECKS]
    if args.json:
        print_json(Doctor(checks=tuple(checks)))
        return ExitCode.DONE
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.status:<8}{check.name:<{width}}  {check.found}")
        if check.mend:
            print(f"{'':<8}{'':<{width}}  mend: {check.mend}")
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "missing")}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return ExitCode.DONE
