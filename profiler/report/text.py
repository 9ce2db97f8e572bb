"""A report as plain text, for a terminal or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llmtop.profiler.effects.switches import Switch
from llmtop.profiler.fold.rankstate import WARMUP_STEPS
from llmtop.profiler.oom.words import evidence, fix_words, moment_words
from llmtop.profiler.report.contents import RankReport, Report
from llmtop.profiler.report.hosts import host_lines
from llmtop.profiler.report.memorytext import memory_lines
from llmtop.profiler.report.quantized import quantized_lines
from llmtop.profiler.report.toldsteps import told_words
from llmtop.profiler.report.wrapping import hanging, wrapped
from llmtop.profiler.units import (
    NOT_AVAILABLE,
    counted,
    format_bytes,
    format_change,
    format_count,
    format_joules,
    format_moment,
    format_percent,
    format_range,
    format_seconds,
    format_tokens_rate,
)

_TOP_KERNELS = 6
_MARKS = {"critical": "!!", "warning": "! ", "info": "i "}

Section = Callable[[Report, int], Iterator[str]]


def render(report: Report, width: int = 80) -> str:
    """The whole report in lines of at most `width` columns, file paths aside."""
    blocks = ["\n".join(section(report, width)) for section in _SECTIONS]
    return "\n\n".join(block for block in blocks if block)


def _head(report: Report, width: int) -> Iterator[str]:
    status = report.status.replace("_", " ")
    yield f"{report.run_id}".ljust(width - len(status) - 1) + " " + status
    if report.reason:
        yield from wrapped(report.reason, width)
    if report.fix:
        yield from wrapped(f"fix: {report.fix}", width)
    if report.imported:
        yield from hanging("imported", report.imported, width)
    trained = (
        ""
        if report.trainable_params == report.params
        else f", {format_count(report.trainable_params)} trained"
    )
    if report.command:
        yield from hanging("command", report.command, width)
    if report.not_predicted:
        yield from hanging("model", model_line(report), width)
        yield from hanging("prediction", f"none: {report.not_predicted}", width)
        yield f"  began {_began(report)}, {took_words(report)}"
        return
    settings = settings_words(report)
    yield from wrapped(
        f"{report.model} ({format_count(report.params)} parameters{trained}) on {report.world_size} x "
        f"{report.gpu}: {settings}",
        width,
    )
    yield f"  began {_began(report)}, {took_words(report)}"
    for name in report.inputs.__struct_fields__:
        yield from hanging(name, getattr(report.inputs, name), width)


def settings_words(report: Report) -> str:
    """Of a script only what was seen of it."""
    told = (
        None if report.zero is None else f"ZeRO-{report.zero}",
        report.precision,
        None if report.attention is None else f"{report.attention} attention",
        report.optimizer,
    )
    return ", ".join(word for word in told if word is not None)


def model_line(report: Report) -> str:
    """Of a script that is not predicted: what was found in it, and where it runs."""
    told = settings_words(report)
    return f"{report.model} on {report.world_size} x {report.gpu}" + (f": {told}" if told else "")


def took_words(report: Report) -> str:
    paused = format_seconds(report.paused_seconds)
    return f"{format_seconds(report.seconds)} in all" + (
        f", without {paused} between an end and going on" if report.paused_seconds >= 1 else ""
    )


def _began(report: Report) -> str:
    return format_moment(report.started)


def _out_of_memory(report: Report, width: int) -> Iterator[str]:
    found = report.out_of_memory
    if found is None:
        return
    yield "Out of memory"
    at = f" at {found.where}" if found.where else ""
    yield from hanging("when", f"{moment_words(found)}{at}", width)
    for label, text in evidence(found):
        yield from hanging(label, text, width)
    for fix in found.fixes:
        label = "another run" if fix.number is None else f"fix {fix.number}"
        command = f"; {fix.command}" if fix.command and report.status == "out_of_memory" else ""
        yield from hanging(label, f"{fix_words(fix)}{command}", width)


def _scale(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else f"{value:,.10g}"


def skipped_words(report: Report) -> str:
    """Of those made: a run that was gone on with from an earlier step made some of them again."""
    return f"{report.skipped_steps:,} skipped of {report.steps_made:,} made"


def _training(report: Report, width: int) -> Iterator[str]:
    yield "Training"
    skipped = f", {skipped_words(report)}" if report.skipped_steps else ""
    planned = "" if report.steps_planned is None else f" of {report.steps_planned}"
    yield f"  {'steps':<16}{report.steps_finished}{planned}{skipped}"
    yield f"  {'loss':<16}{_number(report.first_loss)} -> {_number(report.last_loss)}{_fall(report)}"
    if report.last_loss_scale is not None:
        yield f"  {'loss scale':<16}{_scale(report.first_loss_scale)} -> {_scale(report.last_loss_scale)}"
    predicted_step = format_seconds(report.predicted_step_seconds)
    yield from hanging("step time", f"{_median(report)} (predicted {predicted_step})", width)
    yield (
        f"  {'throughput':<16}{format_tokens_rate(report.tokens_per_second)}"
        f" (predicted {format_tokens_rate(report.predicted_tokens_per_second)})"
    )
    yield from hanging("MFU", _utilisation(report), width)
    if report.phases:
        parts = ", ".join(f"{p.phase} {format_seconds(p.seconds)} ({p.percent:.0f}%)" for p in report.phases)
        means = told_words(report.phase_steps, report.untold_phase_steps)
        yield from hanging("phases", parts + (f"; {means}" if means else ""), width)
    if report.startup:
        parts = ", ".join(
            f"{stage.stage.replace('_', ' ')} "
            + ("not finished" if stage.seconds is None else format_seconds(stage.seconds))
            for stage in report.startup
        )
        yield from hanging("start-up", parts, width)
    if checkpoints := "; ".join(_checkpoints(report)):
        yield from hanging("checkpoints", checkpoints, width)


def _checkpoints(report: Report) -> Iterator[str]:
    saved, refused = report.checkpoints, report.checkpoints_refused
    if saved:
        size = format_bytes(saved[-1].size_bytes)
        yield f"{len(saved)} saved, the last at step {saved[-1].step} ({size})"
    if refused:
        none = "" if saved else "none saved; "
        yield f"{none}{len(refused)} refused, the last at step {refused[-1].step}: {refused[-1].why}"
    if report.not_saved:
        yield report.not_saved


def _utilisation(report: Report) -> str:
    """Model FLOP/s of the peak, and by which count."""
    if report.peak_flops_per_second is None:
        reason = (
            "a CPU's peak is not known" if report.device_kind == "cpu" else "this GPU's peak is not known"
        )
        if report.not_predicted:
            reason = "the shape of its model is not known"
        return f"{NOT_AVAILABLE}, {reason}"
    peak = report.peak_flops_per_second / 1e12
    if report.mfu_percent is None:
        return f"{NOT_AVAILABLE} of {peak:,.0f} TFLOP/s"
    return (
        f"{format_percent(report.mfu_percent)} of {peak:,.0f} TFLOP/s ({report.precision}, dense), by PaLM's"
        f" count; {format_percent(report.needed_mfu_percent)} without what the causal mask leaves out"
    )


def _hardware(report: Report, width: int) -> Iterator[str]:
    yield "Hardware"
    for device in report.devices:
        yield (
            f"  GPU {device.index:<12}{format_bytes(device.peak_bytes)} of {format_bytes(device.total_bytes)}"
            f" at most ({device.name or NOT_AVAILABLE})"
        )
    drawn = [device.energy_joules for device in report.devices if device.energy_joules is not None]
    if drawn:
        per_token = format_joules(report.joules_per_token)
        yield f"  {'energy':<16}{format_joules(sum(drawn))} of all GPUs, {per_token} a token"
    host = report.host_memory
    if report.hosts and host.peak_bytes is None:
        # Each of them has its own.
        yield from hanging("ranks", _ranks(report.ranks), width)
        return
    yield f"  {'host memory':<16}{format_bytes(host.peak_bytes)} of {format_bytes(host.total_bytes)} at most"
    yield (
        f"  {'of this run':<16}{format_bytes(host.ranks_pss_bytes)} in the ranks (PSS), "
        f"predicted {format_bytes(host.predicted_bytes)}"
    )
    if host.compilers_peak_bytes is not None:
        yield f"  {'building ops':<16}{format_bytes(host.compilers_peak_bytes)} more at most, in compilers"
    if host.cgroup_limit_bytes is not None:
        yield (
            f"  {'cgroup':<16}{format_bytes(host.cgroup_peak_bytes)} of "
            f"{format_bytes(host.cgroup_limit_bytes)} at most"
        )
    if host.swap_peak_bytes:
        yield f"  {'swap':<16}{format_bytes(host.swap_peak_bytes)} at most"
    yield from hanging("ranks", _ranks(report.ranks), width)


def _hosts(report: Report, width: int) -> Iterator[str]:
    yield from host_lines(report.hosts, width)


def _ranks(ranks: tuple[RankReport, ...]) -> str:
    """Ranks that ended alike are told together."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(_ending(rank), []).append(rank.rank)
    if not groups:
        return "none started"
    return "; ".join(
        f"{'rank' if len(numbers) == 1 else 'ranks'} {_numbers(numbers)} {ending}"
        for ending, numbers in groups.items()
    )


def _ending(rank: RankReport) -> str:
    if rank.signal is not None:
        ending = f"ended by {rank.signal}"
    elif rank.exit_code is not None:
        ending = f"exited with {rank.exit_code}"
    else:
        ending = "running, or its end not known"
    after = f" after step {rank.last_step}" if rank.last_step else ", no step made"
    return ending + after + (f" ({rank.failure})" if rank.failure else "")


def _numbers(ranks: list[int]) -> str:
    if len(ranks) > 2 and len(set(ranks)) == len(ranks) == ranks[-1] - ranks[0] + 1:
        return f"{ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _switches(report: Report, width: int) -> Iterator[str]:
    """Those that are on, or that another run was measured without."""
    told = [s for s in report.switches if not s.is_off or s.compared_run is not None or s.on is False]
    if not told:
        return
    yield "Switches"
    for switch in told:
        on = {True: "on", False: "NOT ON", None: "not confirmed"}[switch.on]
        parts = [f"{switch.asked}: {on} ({switch.evidence})", *_switch_change(switch)]
        yield from hanging(switch.label, "; ".join(parts), width)


def _switch_change(switch: Switch) -> Iterator[str]:
    if switch.compared_run is not None:
        yield (
            f"step time {format_percent(switch.step_percent, signed=True)}"
            f"{' (within noise)' if switch.step_within_noise else ''}, "
            f"tokens/s {format_percent(switch.tokens_percent, signed=True)}, "
            f"peak {format_bytes(switch.peak_bytes_change, signed=True)} "
            f"against {switch.compared_setting} ({switch.compared_run})"
        )
        if switch.note:
            yield switch.note
        return
    yield "not measured: no run differs in it alone"
    if switch.predicted_bytes_change is not None:
        size = format_bytes(switch.predicted_bytes_change, signed=True)
        yield f"predicted peak {size} against {switch.compared_setting}"


def _kernels(report: Report, width: int) -> Iterator[str]:
    """The few that took longest, of the one micro-batch that was recorded."""
    seen = report.kernels
    if seen is None or seen.total_seconds <= 0:
        return
    what = "operators" if report.device_kind == "cpu" else "kernels"
    yield f"Longest {what} of a micro-batch (step {seen.step}, {format_seconds(seen.total_seconds)} in all)"
    for kernel in seen.top[:_TOP_KERNELS]:
        share = format_percent(100 * kernel.seconds / seen.total_seconds)
        yield f"  {share:>6}{kernel.calls:>7} x  {kernel.name}"[:width]


def _snapshots(report: Report, width: int) -> Iterator[str]:
    shown = [one for one in report.snapshots if one.lines]
    if shown:
        yield "Closer looks"
    if len(shown) < len(report.snapshots):
        yield f"  {counted(len(report.snapshots) - len(shown), 'earlier one')}: see snapshots/ in the folder"
    for one in shown:
        yield from (f"  {line}" for line in one.lines)


def _quantized(report: Report, width: int) -> Iterator[str]:
    if report.quantized:
        yield "In fewer bits"
    for head, rows in quantized_lines(report.quantized):
        yield from wrapped(head, width, indent="  ", hang="     ")
        for name, text in rows:
            yield from wrapped(f"{name:<12}{text}", width, indent="     ", hang=" " * 17)


def _changes(report: Report, width: int) -> Iterator[str]:
    if report.changes:
        yield "Changes"
    for change in report.changes:
        yield from wrapped(f"{change.what}: {change.outcome}", width, indent="  ", hang="     ")
        yield from wrapped("; ".join(change.details), width, indent="     ", hang="     ")


def _findings(report: Report, width: int) -> Iterator[str]:
    yield "Findings"
    if not report.findings:
        yield "  nothing stands out"
    for finding in report.findings:
        yield from wrapped(f"{_MARKS[finding.severity]} {finding.title}", width, indent="  ", hang="     ")
        yield from wrapped(finding.evidence, width, indent="     ", hang="     ")
        if finding.change:
            yield from wrapped(f"-> {finding.change}", width, indent="     ", hang="        ")


def _record(report: Report, width: int) -> Iterator[str]:
    yield "Record"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items() if version)
    if versions:
        yield from hanging("versions", versions, width)
    yield f"  {'folder':<16}{report.files.get('run', NOT_AVAILABLE)}"
    if report.thinned_until is not None:
        until = format_moment(report.thinned_until)
        left_out = counted(report.thinned_events, "step or sample", "steps and samples")
        text = f"{left_out} before {until} are added up in those that stay: the record is long"
        yield from hanging("thinned", text, width)
    if report.skipped_lines:
        are = "is" if report.skipped_lines == 1 else "are"
        text = f"{counted(report.skipped_lines, 'line')} {are} damaged or of a newer version, and left out"
        yield from hanging("not understood", text, width)


_SECTIONS: tuple[Section, ...] = (
    *(_head, _out_of_memory, _training, _changes, memory_lines, _hosts),
    *(_hardware, _switches, _kernels, _snapshots),
    *(_quantized, _findings, _record),
)


def _median(report: Report) -> str:
    if report.step_seconds is None:
        return f"{NOT_AVAILABLE}, too few steps after the first {WARMUP_STEPS}"
    return (
        f"{format_seconds(report.step_seconds)} median after the first {WARMUP_STEPS} steps{_spread(report)}"
    )


def _spread(report: Report) -> str:
    if report.step_spread is None:
        return ""
    spread = report.step_spread
    between = format_range(format_seconds(spread.low_seconds), format_seconds(spread.high_seconds))
    return f", half of them {between}"


def _number(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else f"{value:.4g}"


def _fall(report: Report) -> str:
    if report.first_loss is None or report.last_loss is None or report.first_loss <= 0:
        return ""
    return f" ({format_change(100 * (report.last_loss / report.first_loss - 1))})"
