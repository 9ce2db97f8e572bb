"""`llmtop weights`: what a run has trained, as a folder that Transformers or PEFT load."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.units import counted, format_bytes
from llmtop.trainer.weightsjob import Content
from llmtop.trainer.weightsout import Choice, OnProgress, WeightsOut, take_weights_out
from llmtop.tui.commandline.arguments import RUN_HELP
from llmtop.tui.commandline.runs import find_run_here
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.output import print_json

_EVERY_SECONDS = 1.0
_WHAT: dict[Content, str] = {
    "full": "all weights",
    "merged": "the base with its adapters added",
    "adapters": "adapters alone",
    "quantized": "packed weights",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to make; it must not be there yet")
    parser.add_argument(
        "--from",
        dest="checkpoint",
        default="",
        metavar="CHECKPOINT",
        help="a step, or a step-N folder; by default the newest that is complete",
    )
    content = parser.add_mutually_exclusive_group()
    content.add_argument("--merge", action="store_true", help="the base with the adapters added to it")
    content.add_argument("--adapters", action="store_true", help="the adapters alone, as PEFT has them")
    content.add_argument(
        "--quantized", action="store_true", help="of a run with --qat: in the bits that it was trained for"
    )
    parser.add_argument(
        "--base",
        choices=("trained", "original"),
        default="trained",
        help="with --merge, of a base packed to int8 or nf4: the values that it stood for, which the adapters"
        " were trained on, or those of the folder before it was packed",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="by default the run's own precision; fp32: as the optimizer keeps them",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    found = find_run_here(args.run, "weights")
    if args.base != "trained" and not args.merge:
        raise UsageError("--base says what to merge into", fix="add --merge, or leave --base out")
    choice = Choice(content=_content(args), base=args.base, dtype=args.dtype, checkpoint=args.checkpoint)
    made = take_weights_out(found, args.out, choice, _progress())
    if args.json:
        print_json(_plain(made))
    else:
        print("\n".join(_lines(made)))
    return ExitCode.DONE


def _content(args: argparse.Namespace) -> Content:
    if args.merge:
        return "merged"
    if args.adapters:
        return "adapters"
    return "quantized" if args.quantized else "full"


def _progress() -> OnProgress:
    """A line now and then while much is written."""
    told = time.monotonic()

    def tell_now_and_then(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _EVERY_SECONDS:
            told = time.monotonic()
            tell(f"{format_bytes(done)} of {format_bytes(total)} written")

    return tell_now_and_then


def _plain(made: WeightsOut) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins({**msgspec.structs.asdict(made), "path": str(made.path)})
    return plain


def _lines(made: WeightsOut) -> list[str]:
    rest = ", all that is not packed" if made.content == "quantized" else ""
    return [
        f"{made.path}: {_WHAT[made.content]} of step {made.step:,}{rest} in {made.dtype}, "
        f"{counted(made.tensors, 'tensor')}, {made.parameters:,} numbers, {format_bytes(made.size_bytes)}",
        *([f"  WARNING: {made.warning}"] if made.warning else []),
        *(f"  {note}" for note in made.notes),
        *_how_to_load(made),
    ]


def _how_to_load(made: WeightsOut) -> list[str]:
    if not sys.stdout.isatty():
        return []
    if made.content == "adapters":
        return [f"  load it: PeftModel.from_pretrained(base, {str(made.path)!r})"]
    return [f"  load it: AutoModelForCausalLM.from_pretrained({str(made.path)!r})"]
