"""`llmtop quantize`: a model in fewer bits, and what that has cost."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.presets.paths import expand_user, is_file
from llmtop.profiler.quantized import Quantized
from llmtop.profiler.record import rundir
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.quantizedtext import load_words, quantized_head, quantized_rows
from llmtop.profiler.units import format_bytes, format_count
from llmtop.trainer.folders import check_place
from llmtop.trainer.quantize.bytetokenizer import used_bytes, write_byte_tokenizer
from llmtop.trainer.quantize.convert import (
    CONTEXT,
    ELSEWHERE,
    SECONDS,
    WINDOW,
    Choice,
    Outlook,
    aside,
    beside,
    check_output,
    check_room,
    keep,
    measured,
    outlook,
    quantize,
    require_packer,
)
from llmtop.trainer.quantize.families import family_of
from llmtop.trainer.quantize.job import Working
from llmtop.trainer.quantize.source import Source, read_source
from llmtop.trainer.quantize.target import FORMS, Target, read_target
from llmtop.trainer.quantize.working import Progress
from llmtop.trainer.tune.interrupt import interruptible
from llmtop.tui.commandline.arguments import positive
from llmtop.tui.commandline.runs import refuse_run_elsewhere
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.output import named_lines, print_json, text_width, wrapped

_EVERY_SECONDS = 2.0


class _Of(Struct, frozen=True, kw_only=True):
    """What the weights were taken out of."""

    run: RunDir
    step: int
    notes: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a folder of weights (safetensors), or a run")
    parser.add_argument(
        "--to", required=True, metavar="FORM", help=f"{', '.join(FORMS)}: bitsandbytes', or llama.cpp's GGUF"
    )
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="where to; by default the model's name and the form, here"
    )
    parser.add_argument("--force", action="store_true", help="in place of an output that is there")
    parser.add_argument(
        "--from",
        dest="checkpoint",
        default="",
        metavar="CHECKPOINT",
        help="of a run: a step, or a step-N folder; by default the newest that is complete",
    )
    parser.add_argument(
        "--text", default="", metavar="FILE", help="measure perplexity on this; by default a page of English"
    )
    parser.add_argument("--no-perplexity", action="store_true", help="do not measure it")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=SECONDS,
        metavar="S",
        help=f"the most for each of the two measurements (default: {SECONDS:g})",
    )
    parser.add_argument(
        "--window",
        type=_window,
        default=WINDOW,
        metavar="N",
        help=f"tokens that are read together there (default: {WINDOW})",
    )
    parser.add_argument(
        "--context",
        type=_window,
        default=CONTEXT,
        metavar="N",
        help="tokens kept, of the GPU memory that is predicted for loading it; at most as many as the"
        f" model was made for (default: {CONTEXT:,})",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what it comes to; makes nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    target = read_target(args.to)
    choice = Choice(
        force=args.force,
        perplexity=not args.no_perplexity,
        text=expand_user(args.text) if args.text else "",
        window=args.window,
        seconds=args.seconds,
        context=args.context,
    )
    folder = Path(expand_user(args.source))
    if _is_model_folder(folder):
        if args.checkpoint:
            raise UsageError("--from is for a run", why=f"{args.source} is a folder", fix="leave it out")
        return _of_folder(folder, target, choice, args)
    return _of_run(args.source, target, choice, args)


def _is_model_folder(folder: Path) -> bool:
    """What is no folder at all may be a run's id, unless it is written as a path."""
    if folder.is_dir():
        return not (folder / "spec.json").is_file()
    return len(folder.parts) > 1


def _of_folder(folder: Path, target: Target, choice: Choice, args: argparse.Namespace) -> ExitCode:
    out = args.out or _default_out(folder.resolve().name, target)
    if args.dry_run:
        source = read_source(folder)
        check_place(out, ELSEWHERE)
        found = outlook(source, target, out, choice)
        check_room(found, out)
        _show_outlook(found, as_json=args.json)
        return ExitCode.DONE
    check_output(out, choice)
    source = read_source(folder)
    check_room(outlook(source, target, out, choice), out)
    with interruptible(), aside(out) as place:
        made = _make(source, target, out, place, choice, None)
    _show(made, as_json=args.json)
    return ExitCode.DONE


def _of_run(ref: str, target: Target, choice: Choice, args: argparse.Namespace) -> ExitCode:
    from llmtop.trainer.weightsjob import Content
    from llmtop.trainer.weightsout import Choice as WeightsChoice
    from llmtop.trainer.weightsout import take_weights_out

    found = _find_run(ref)
    spec = found.spec()
    if args.dry_run:
        raise UsageError(
            "--dry-run is for a folder",
            why="a run's weights have to be taken out before they can be looked at",
            fix=f"llmtop weights {found.run_id} FOLDER, then this for FOLDER",
        )
    out = args.out or _default_out(found.run_id, target)
    check_output(out, choice)
    require_packer(target)  # before the run's weights are taken out, which takes long
    if target.packer == "gguf" and spec.script is None:
        family_of(spec.model, f"run {found.run_id}")
    with interruptible(), aside(out) as place:
        content: Content = "merged" if spec.options.lora_rank else "full"
        weights = take_weights_out(
            found,
            place / found.run_id,
            WeightsChoice(content=content, checkpoint=args.checkpoint),
            _bytes_progress(),
        )
        later = (weights.warning,) if weights.warning else ()
        of = _Of(run=found, step=weights.step, notes=(*later, *weights.notes))
        if used_bytes(spec, weights.path):
            write_byte_tokenizer(weights.path, spec.model.vocab_size)
            # What was said of its absence is no longer so.
            of = replace(of, notes=tuple(note for note in of.notes if "tokenizer" not in note))
        made = _make(read_source(weights.path), target, out, place, choice, of)
    _show(made, as_json=args.json)
    return ExitCode.DONE


def _find_run(ref: str) -> RunDir:
    refuse_run_elsewhere(ref, "quantize")
    try:
        return rundir.find_run(rundir.runs_root(), ref)
    except UsageError as error:
        if is_file(Path(expand_user(ref))):
            # That it is not the folder that is asked for.
            read_source(Path(expand_user(ref)))
        raise UsageError(
            f"{ref}: neither a folder of weights nor a run",
            why=error.in_one_line,
            fix="give a folder with config.json and safetensors, or a run of llmtop ls",
        ) from error


def _make(
    source: Source, target: Target, out: Path, place: Path, choice: Choice, of: _Of | None
) -> Quantized:
    progress = _progress()
    made = quantize(source, target, out, place, choice, progress)
    if of is not None:
        made = replace(made, source=of.run.run_id, step=of.step, notes=(*of.notes, *made.notes))
    with _whole_already(out):
        _keep(replace(made, no_perplexity="it was not measured to its end"), out, of)
        made = measured(made, source, target, out, choice, progress)
        _keep(made, out, of)
    return made


def _keep(made: Quantized, out: Path, of: _Of | None) -> None:
    keep(made, beside(out))
    if of is not None:
        keep(made, of.run.quantized_path(out.name))


@contextmanager
def _whole_already(out: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        tell(f"{out} is whole; what its perplexity is was not measured to the end")
        raise


def _default_out(name: str, target: Target) -> Path:
    return Path(f"{name}-{target.kind}.gguf" if target.packer == "gguf" else f"{name}-{target.kind}")


def _progress() -> Progress:
    """A line now and then while it takes long."""
    told = time.monotonic()

    def tell_now_and_then(working: Working) -> None:
        nonlocal told
        if time.monotonic() - told >= _EVERY_SECONDS:
            told = time.monotonic()
            tell(f"{working.doing}: {_so_far(working)}")

    return tell_now_and_then


def _so_far(working: Working) -> str:
    if not working.total:
        return f"{working.done:,} tokens"
    return f"{format_bytes(working.done)} of {format_bytes(working.total)}"


def _bytes_progress() -> Callable[[int, int], object]:
    progress = _progress()
    return lambda done, total: progress(Working(doing="taking the weights out", done=done, total=total))


def _show(made: Quantized, *, as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    width = text_width()
    lines = [*wrapped(quantized_head(made), "", width), *named_lines(list(quantized_rows(made)), width)]
    print("\n".join(lines))
    tell(f"every tensor's error is in {beside(Path(made.output))}")


def _show_outlook(found: Outlook, *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    width = text_width()
    rows = [
        (
            "bytes",
            f"{format_bytes(found.before_bytes)} before, {format_bytes(found.predicted_bytes)} predicted",
        ),
        ("to load", load_words(found.load_bytes, found.context, found.fits_on)),
        ("here", f"{format_bytes(found.host_bytes)} of host memory to make it"),
        *(("note", note) for note in found.notes),
    ]
    head = f"{found.output}: {found.form} of {found.source} ({format_count(found.parameters)} parameters)"
    print("\n".join([*wrapped(head, "", width), *named_lines(rows, width)]))


def _window(text: str) -> int:
    if not text.isdecimal() or not 1 < int(text) < 10**7:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 2 on")
    return int(text)
