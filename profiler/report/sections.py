"""The parts of a run's page that are text and tables."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import fields

from llmtop.presets.errors import written
from llmtop.presets.spec import Provenance, RunOptions, ValueSource
from llmtop.profiler.findings.finding import words
from llmtop.profiler.findings.pace import mean_phases
from llmtop.profiler.fold.rankstate import WARMUP_STEPS
from llmtop.profiler.oom.words import evidence, fix_words, moment_words
from llmtop.profiler.record.stepevents import BETWEEN
from llmtop.profiler.report.columns import print_addends, print_one, unit_for
from llmtop.profiler.report.contents import ComponentReport, RankReport, Report
from llmtop.profiler.report.markup import Markup, details, element, joined, table
from llmtop.profiler.report.pagedata import PageData
from llmtop.profiler.report.quantized import quantized_lines
from llmtop.profiler.report.settings import SettingReport
from llmtop.profiler.report.text import model_line, settings_words, skipped_words, took_words
from llmtop.profiler.report.toldsteps import told_steps_words
from llmtop.profiler.units import (
    NOT_AVAILABLE,
    format_bytes,
    format_count,
    format_joules,
    format_moment,
    format_percent,
    format_range,
    format_seconds,
    format_tokens_rate,
)

_STATUS_KINDS = {"completed": "good", "failed": "bad", "out_of_memory": "bad", "lost": "bad"}
_PLAIN_PHASES = ("data", BETWEEN, "forward", "backward", "optimizer")


def when(wall: float | None) -> str:
    return format_moment(wall)


def head(report: Report) -> Markup:
    status = element("span", words(report.status), kind=f"status {_STATUS_KINDS.get(report.status, '')}")
    trained = (
        ""
        if report.trainable_params == report.params
        else f", {format_count(report.trainable_params)} trained"
    )
    what = (
        f"{report.model} ({format_count(report.params)} parameters{trained}) on {report.world_size} x "
        f"{report.gpu} at {report.host or NOT_AVAILABLE}: {settings_words(report)}"
    )
    parts = [
        element("h1", report.run_id),
        element("p", status, f" {report.reason}" if report.reason else ""),
        element("p", f"What to do: {report.fix}") if report.fix else "",
        element("p", f"Imported {report.imported}.") if report.imported else "",
        element("p", element("code", report.command)) if report.command else "",
        element("p", model_line(report) if report.not_predicted else what),
        element("p", f"Nothing is predicted: {report.not_predicted}") if report.not_predicted else "",
        element("p", f"Began {when(report.started)}, {took_words(report)}.", kind="dim"),
    ]
    return joined(part for part in parts if part)


def _steps(report: Report) -> str:
    planned = report.steps_planned
    return f"{report.steps_finished:,}" + ("" if planned is None else f" of {planned:,}")


def cards(report: Report) -> Markup:
    skipped = f", {skipped_words(report)}" if report.skipped_steps else ""
    rows = (
        (_steps(report), f"steps{skipped}"),
        (_loss(report.last_loss), f"loss, from {_loss(report.first_loss)}"),
        (
            format_seconds(report.step_seconds),
            f"a step, predicted {format_seconds(report.predicted_step_seconds)}",
        ),
        (
            format_tokens_rate(report.tokens_per_second),
            f"predicted {format_tokens_rate(report.predicted_tokens_per_second)}",
        ),
        (
            format_bytes(report.actual_peak_bytes),
            f"peak, predicted {format_bytes(report.predicted_peak_bytes)}",
        ),
        (format_percent(report.mfu_percent), "MFU (PaLM's count)"),
    )
    boxes = [
        element("div", element("b", value), element("span", label), kind="card") for value, label in rows
    ]
    return element("div", *boxes, kind="cards")


def _loss(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else f"{value:.4g}"


def finding_list(report: Report) -> Markup:
    if not report.findings:
        return element("p", "Nothing stands out.")
    return joined(
        element(
            "div",
            element("b", f"{finding.severity}: {finding.title}"),
            element("div", finding.evidence),
            element("div", f"-> {finding.change}") if finding.change else "",
            element("code", finding.command) if finding.command else "",
            kind=f"finding {finding.severity}",
        )
        for finding in report.findings
    )


def out_of_memory(report: Report) -> Markup:
    """Of a run that ran out of memory: when, what was asked for, and what fits. Else empty."""
    found = report.out_of_memory
    if found is None:
        return Markup("")
    at = f" at {found.where}" if found.where else ""
    fixes = [
        (
            "another run" if fix.number is None else f"fix {fix.number}",
            element("span", fix_words(fix), " ", element("code", fix.command) if fix.command else ""),
        )
        for fix in found.fixes
    ]
    return table(("", ""), [("when", f"{moment_words(found)}{at}"), *evidence(found), *fixes])


def peak_table(report: Report) -> Markup:
    """Predicted and actual, in columns that add up as they are printed."""
    unit = unit_for(max(report.predicted_device_bytes or 0, report.actual_peak_bytes or 0))
    inside = [component for component in report.components if component.in_peak]
    outside = [component for component in report.components if not component.in_peak]
    predicted, predicted_sum = print_addends([c.predicted_bytes for c in inside], unit)
    actual, actual_sum = print_addends([*(c.actual_bytes for c in inside), report.unexplained_bytes], unit)
    rows = [
        (words(component.component), left, right, _error(component))
        for component, left, right in zip(inside, predicted, actual, strict=False)
    ]
    share = format_percent(report.unexplained_percent) if report.unexplained_percent is not None else ""
    rows.append(("unexplained", "", actual[-1], f"{share} of peak" if share else ""))
    if not inside:
        predicted_sum = print_one(report.predicted_peak_bytes, unit)
    error = (
        format_percent(report.peak_error_percent, signed=True)
        if report.peak_error_percent is not None
        else ""
    )
    rows.append(("sum = peak", predicted_sum, actual_sum, error))
    rows += [
        (
            f"+ {words(c.component)}",
            print_one(c.predicted_bytes, unit),
            print_one(c.actual_bytes, unit),
            _error(c),
        )
        for c in outside
    ]
    where = f" of rank {report.peak_rank}, in {report.peak_phase}" if report.peak_rank is not None else ""
    title = element("h3", f"Peak memory{where} ({unit.name})")
    return joined((title, table(("component", "predicted", "actual", "error"), rows, right=(1, 2, 3))))


def _error(component: ComponentReport) -> str:
    percent = component.error_percent
    return "" if percent is None or abs(percent) >= 1000 else format_percent(percent, signed=True)


def change_table(report: Report) -> Markup:
    rows = [
        (
            change.what,
            change.outcome,
            "" if change.step is None else f"{change.step:,}",
            "; ".join(change.details),
        )
        for change in report.changes
    ]
    return table(("change", "outcome", "first step", "details"), rows, right=(2,))


def quantized_tables(report: Report) -> Markup:
    """Of each model that was made of the run's weights, what it has cost."""
    parts = [
        part
        for head, rows in quantized_lines(report.quantized)
        for part in (element("h3", head), table(("", ""), rows))
    ]
    return joined(parts)


def setting_table(settings: tuple[SettingReport, ...]) -> Markup:
    """Every setting that a run trained on; of a run that was not changed there is nothing to tell."""
    if len(settings) < 2:
        return Markup("")
    rows = [
        (
            str(setting.setting),
            ", ".join(f"{name}={written_value(value)}" for name, value in setting.options.items())
            or "as launched",
            format_range(f"{setting.first_step:,}", _last(setting)),
            format_seconds(setting.step_seconds),
            format_bytes(setting.peak_bytes),
            format_bytes(setting.predicted_peak_bytes),
        )
        for setting in settings
    ]
    heads = ("setting", "options", "steps", "step time", "peak", "predicted peak")
    return joined((element("h3", "Settings"), table(heads, rows, right=(3, 4, 5))))


def _last(setting: SettingReport) -> str:
    return "none yet" if setting.last_step is None else f"{setting.last_step:,}"


def rank_table(data: PageData) -> Markup:
    """A row a rank: what it held, how long its phases took, how it ended."""
    means = {rank.rank: mean_phases(data.state.ranks.get(rank.rank), 1) for rank in data.report.ranks}
    has_between = any(BETWEEN in told for told in means.values())
    phases = [phase for phase in _PLAIN_PHASES if phase != BETWEEN or has_between]
    heads = ("rank", "pid", "last step", "peak", "RSS", "PSS", *phases, "end")
    rows = [_rank_row(rank, [means[rank.rank].get(phase) for phase in phases]) for rank in data.report.ranks]
    means_of = told_steps_words(data.state.first) or f"means over the steps after the first {WARMUP_STEPS}"
    note = element("p", f"Phases: {means_of}.", kind="dim") if rows else ""
    return joined((table(heads, rows, right=range(len(heads) - 1)), note))


def _rank_row(rank: RankReport, phase_seconds: list[float | None]) -> tuple[str, ...]:
    end = rank.signal or (NOT_AVAILABLE if rank.exit_code is None else f"exit {rank.exit_code}")
    return (
        str(rank.rank),
        NOT_AVAILABLE if rank.pid is None else str(rank.pid),
        f"{rank.last_step:,}",
        format_bytes(rank.peak_bytes),
        format_bytes(rank.peak_rss_bytes),
        format_bytes(rank.peak_pss_bytes),
        *map(format_seconds, phase_seconds),
        end + (f": {rank.failure}" if rank.failure else ""),
    )


def device_table(data: PageData) -> Markup:
    topology = {device.index: device for device in data.state.topology.devices} if data.state.topology else {}
    rows = []
    for device in data.report.devices:
        built = topology.get(device.index)
        pcie = links = NOT_AVAILABLE
        if built is not None and built.pcie_generation is not None:
            pcie = f"{built.pcie_generation}.0 x{built.pcie_width or '?'}"
        if built is not None and built.nvlinks is not None:
            links = f"{built.nvlinks} to {built.nvlink_peer or '?'}" if built.nvlinks else "none"
        rows.append(
            (
                str(device.index),
                device.name or NOT_AVAILABLE,
                f"{format_bytes(device.peak_bytes)} of {format_bytes(device.total_bytes)}",
                pcie,
                links,
                format_joules(device.energy_joules),
            )
        )
    return table(("GPU", "name", "largest use", "PCIe", "NVLinks", "energy"), rows, right=(0,))


def host_lines(report: Report) -> Markup:
    host = report.host_memory
    rows = [
        ("host memory, largest use", f"{format_bytes(host.peak_bytes)} of {format_bytes(host.total_bytes)}"),
        (
            "of this run (PSS)",
            f"{format_bytes(host.ranks_pss_bytes)}, predicted {format_bytes(host.predicted_bytes)}",
        ),
    ]
    if host.compilers_peak_bytes is not None:
        rows.append(("compilers of ops, beside it", format_bytes(host.compilers_peak_bytes)))
    if host.cgroup_limit_bytes is not None:
        used = f"{format_bytes(host.cgroup_peak_bytes)} of {format_bytes(host.cgroup_limit_bytes)}"
        rows.append(("cgroup", used))
    if host.swap_peak_bytes:
        rows.append(("swap", format_bytes(host.swap_peak_bytes)))
    return table(("", ""), rows)


def switch_table(report: Report) -> Markup:
    rows = []
    for switch in report.switches:
        if switch.is_off and switch.compared_run is None and switch.on is not False:
            continue
        on = {True: "on", False: "NOT ON", None: "not confirmed"}[switch.on]
        change = "not measured"
        if switch.compared_run is not None:
            change = (
                f"step time {format_percent(switch.step_percent, signed=True)}, peak "
                f"{format_bytes(switch.peak_bytes_change, signed=True)} against {switch.compared_setting}"
            )
        rows.append((switch.label, switch.asked, on, switch.evidence, change))
    return table(("switch", "asked", "really", "evidence", "change"), rows)


def kernel_table(report: Report) -> Markup:
    seen = report.kernels
    if seen is None or seen.total_seconds <= 0:
        return Markup("")
    rows = [
        (
            kernel.name,
            f"{kernel.calls:,}",
            format_seconds(kernel.seconds),
            format_percent(100 * kernel.seconds / seen.total_seconds),
        )
        for kernel in seen.top
    ]
    what = "operators" if report.device_kind == "cpu" else "kernels"
    title = element("h3", f"Longest {what} of a micro-batch of step {seen.step}")
    return joined((title, table(("name", "calls", "time", "share"), rows, right=(1, 2, 3))))


def configuration(data: PageData) -> Markup:
    """What was chosen first, what nobody chose folded away, then the DeepSpeed file."""
    rows = list(_option_rows(data))
    chosen = [row for row in rows if row[2] != ValueSource.DEFAULT]
    defaults = [row[:2] for row in rows if row[2] == ValueSource.DEFAULT]
    text = msgspec.json.format(msgspec.json.encode(data.deepspeed), indent=2).decode()
    return joined(
        (
            table(("option", "value", "from", ""), chosen),
            details(f"{len(defaults)} options at their defaults", table(("option", "value"), defaults)),
            details("DeepSpeed configuration", element("pre", text)),
        )
    )


def _option_rows(data: PageData) -> Iterator[tuple[str, str, str, str]]:
    for option in fields(RunOptions):
        if not data.spec.knows(option.name):
            continue
        value = getattr(data.spec.options, option.name)
        source = data.spec.provenance.get(option.name) or Provenance(source=ValueSource.DEFAULT)
        yield option.name, written_value(value), str(source.source), source.detail


def written_value(value: object) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None or value == {} else written(value)


def environment(data: PageData) -> Markup:
    report = data.report
    versions = [(name, version) for name, version in report.versions.items() if version]
    inputs = [(name, getattr(report.inputs, name)) for name in report.inputs.__struct_fields__]
    startup = [
        (words(stage.stage), "not finished" if stage.seconds is None else format_seconds(stage.seconds))
        for stage in report.startup
    ]
    where = data.environment
    machine = [
        (name, str(value))
        for name, value in (
            ("system", where.system),
            ("machine", where.machine),
            ("processors", where.cpus),
            ("NVIDIA driver", where.driver),
            ("Python", where.python),
            *where.variables.items(),
        )
        if value is not None
    ]
    parts = [
        table(("package", "version"), versions),
        table(("", ""), machine),
        element("h3", "Inputs"),
        table(("", ""), inputs),
    ]
    if startup:
        parts += [element("h3", "Start-up, slowest rank"), table(("stage", "time"), startup, right=(1,))]
    return joined(parts)
