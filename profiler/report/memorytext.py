"""The report's table of memory: what was predicted, what there was, and what the peak does not hold."""

from __future__ import annotations

from collections.abc import Iterator

from llmtop.profiler.memory.result import MOMENT_WORDS
from llmtop.profiler.report.columns import ColumnUnit, print_addends, print_one, unit_for
from llmtop.profiler.report.contents import ComponentReport, Report
from llmtop.profiler.report.wrapping import wrapped
from llmtop.profiler.units import NOT_AVAILABLE, format_bytes, format_percent

_LABEL, _VALUE = 24, 13
SMALL_SHARE = 0.005
"""Of the peak; no error is given for a component that is smaller on both sides."""
_SEEN = (
    "the peak is what was in use then: since the change the process keeps what the setting before had freed,"
    " and between two such moments nothing tells them apart."
)
_ERROR_WORDS = (
    "Error: + where more was predicted than there was, - where less; none for what is below 0.5% of the peak."
)


def memory_lines(report: Report, width: int) -> Iterator[str]:
    on_cpu = report.device_kind == "cpu"
    largest = max(
        report.predicted_device_bytes or 0, report.predicted_peak_bytes or 0, report.actual_peak_bytes or 0
    )
    unit = unit_for(largest)
    what = "in use" if on_cpu else "allocated"
    where = ""
    if report.peak_rank is not None:
        where = f" on rank {report.peak_rank}, in {report.peak_phase}"
    yield f"Peak memory, {what}{where}".ljust(_LABEL) + f" ({unit.name})"
    yield _row("", "predicted", "actual", "error")
    inside = [component for component in report.components if component.in_peak]
    predicted, predicted_sum = print_addends([c.predicted_bytes for c in inside], unit)
    actual, actual_sum = print_addends([*(c.actual_bytes for c in inside), report.unexplained_bytes], unit)
    for component, left, right in zip(inside, predicted, actual, strict=False):
        yield _row(_words(component), left, right, _component_error(component, report))
    share = (
        "" if report.unexplained_percent is None else f"{format_percent(report.unexplained_percent)} of peak"
    )
    yield _row("unexplained", "", actual[-1], share)
    yield _rule()
    if not inside:
        predicted_sum = print_one(report.predicted_peak_bytes, unit)
    yield _row("sum = peak", predicted_sum, actual_sum, _error(report.peak_error_percent))
    yield from _outside(report, unit)
    yield from _moments(report, width)


def _outside(report: Report, unit: ColumnUnit) -> Iterator[str]:
    """From the allocated peak to what NVML reads, or from what was in use to what the process held."""
    outside = [component for component in report.components if not component.in_peak]
    if not outside:
        return
    predicted, predicted_sum = print_addends(
        [report.predicted_peak_bytes, *(c.predicted_bytes for c in outside)], unit
    )
    actual, actual_sum = print_addends([report.actual_peak_bytes, *(c.actual_bytes for c in outside)], unit)
    for component, left, right in zip(outside, predicted[1:], actual[1:], strict=True):
        yield _row(f"+ {_words(component)}", left, right, _component_error(component, report))
    yield _rule()
    known = all(component.actual_bytes is not None for component in outside)
    whole = "sum = process" if report.device_kind == "cpu" else "sum = device (NVML)"
    yield _row(whole, predicted_sum, actual_sum if known else NOT_AVAILABLE, "")


def _moment_words(moment: str) -> str:
    """A newer version may have written one that is not known here."""
    return MOMENT_WORDS.get(moment, moment.replace("_", " "))


def _moments(report: Report, width: int) -> Iterator[str]:
    if report.predicted_peak_bytes is None:
        return
    predicted = _moment_words(report.predicted_moment)
    text = f"The peak is predicted at '{predicted}'"
    if report.actual_moment is not None:
        actual = _moment_words(report.actual_moment)
        text += f"; tensors were classified at '{actual}', and "
        text += _SEEN if report.peak_is_seen else "workspace is what the peak holds beyond it."
    elif report.not_yet_measured:
        text += f"; {report.not_yet_measured}."
    else:
        text += "; no tensors have been classified yet."
    upper = format_bytes(report.predicted_peak_upper_bytes)
    if report.device_kind == "cpu":
        held = format_bytes(report.predicted_held_upper_bytes)
        text += f" Upper bounds of the prediction: {upper} in use, {held} held by the process."
    else:
        text += f" Upper bound of the prediction: {upper} allocated."
    yield from wrapped(f"{text} {_ERROR_WORDS}", width)


def _words(component: ComponentReport) -> str:
    return component.component.replace("_", " ")


def _row(label: str, predicted: str, actual: str, error: str) -> str:
    return f"  {label:<{_LABEL}}{predicted:>{_VALUE}}{actual:>{_VALUE}}  {error:>14}".rstrip()


def _rule() -> str:
    return "  " + " " * _LABEL + "-" * (2 * _VALUE)


def _error(percent: float | None) -> str:
    """A prediction's error against almost nothing says nothing."""
    if percent is None or abs(percent) >= 1000:
        return ""
    return format_percent(percent, signed=True)


def _component_error(component: ComponentReport, report: Report) -> str:
    """A percentage of next to nothing alarms for nothing."""
    sizes = (component.predicted_bytes or 0, component.actual_bytes or 0)
    peak = report.actual_peak_bytes or report.predicted_peak_bytes or 0
    return "" if max(sizes) < SMALL_SHARE * peak else _error(component.error_percent)
