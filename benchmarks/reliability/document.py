"""Writes `docs/reliability.md` from the recorded rows."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.reliability.faults import FAULTS, Fault
from llmtop.profiler.record.patientlog import MOST_WAITING_BYTES
from llmtop.profiler.record.segments import SEGMENT_BYTES
from llmtop.profiler.record.thinning import MOST_BYTES, THINNED_BYTES, WHOLE_BYTES
from llmtop.profiler.units import counted, format_bytes
from llmtop.trainer.supervisor.patience import Graces

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
_INTRODUCTION = Path(__file__).with_name("introduction.md")
Row = dict[str, Any]
_MOMENTS = {
    "kills by time": "within 6 s of their launch, which on so busy a machine is most often before the"
    " first step"
    " (their check looked for processes while a killed supervisor was still dying; since then each process is"
    " waited for by its identity, and what is left a minute later is a problem)",
    "kills": "three in ten within 3 s of their launch, the others within 0.4 s after a random step of"
    " the first 16",
}
"""Part to when its kills came."""


def write(results: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["part"], []).append(row)
    PAGE.write_text(page(parts))


def page(parts: dict[str, list[Row]]) -> str:
    graces = Graces()
    introduction = _INTRODUCTION.read_text().format(
        segment=format_bytes(SEGMENT_BYTES),
        whole=format_bytes(WHOLE_BYTES),
        thinned=format_bytes(THINNED_BYTES),
        most=format_bytes(MOST_BYTES),
        waiting=format_bytes(MOST_WAITING_BYTES),
        stop=f"{graces.stop:g}",
        kill=f"{graces.stop + graces.stop_kill:g}",
        script=f"{graces.script:g}",
        folder=f"{graces.folder:g}",
    )
    sections = [introduction, _table(parts), _kills(parts), _cuts(parts), _soak(parts), _real_steps(parts)]
    return "\n".join(filter(None, sections))


def _table(parts: dict[str, list[Row]]) -> str:
    tests = {row["figure"]: row for row in parts.get("tests", [])}
    lines = ["## Faults", "", "| fault | what holds | shown by |", "|---|---|---|"]
    for fault in FAULTS:
        lines.append(f"| {fault.name} | {fault.holds} | {_shown_by(fault, tests.get(fault.name), parts)} |")
    return "\n".join([*lines, ""])


def _shown_by(fault: Fault, row: Row | None, parts: dict[str, list[Row]]) -> str:
    words = []
    for part in fault.parts:
        rows = parts.get(part, [])
        bad = sum(bool(one["problems"]) for one in rows)
        words.append(f"{len(rows) - bad} of {len(rows)} rows of *{part}* below" if rows else f"*{part}*: n/a")
    if row is None:
        words.append("tests: not recorded")
    else:
        all_tests = counted(row["passed"] + len(row["problems"]), "test")
        told = f"{row['passed']} of {all_tests}" if row["problems"] else all_tests
        words.append(told + (f"; failed: {', '.join(row['problems'])}" if row["problems"] else ""))
        words += [f"skipped: {one}" for one in row["skipped"]]
    return "; ".join(words)


def _kills(parts: dict[str, list[Row]]) -> str:
    sections = [_killed(parts[part], how) for part, how in _MOMENTS.items() if parts.get(part)]
    if not sections:
        return ""
    lines = [
        "## SIGKILL at random moments",
        "",
        "Runs of two real ranks (ZeRO-2, CPU, a checkpoint every fourth step), each killed once. Then"
        " the record"
        " is opened in every view, every kept checkpoint is read to its last byte, processes are looked"
        " for, and"
        " of one in ten that had saved one the run is resumed.",
        "",
    ]
    return "\n".join([*lines, "\n".join(sections)])


def _killed(rows: list[Row], how: str) -> str:
    seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
    load = statistics.median(row["load"] for row in rows)
    lines = [
        f"{len(rows)} runs, seed {seeds}, {how}, on {rows[0]['cores']} cores with other work on them"
        f" (load {load:.0f}):",
        "",
        "| killed | runs | before the first step | after checkpoints | how they ended | with a problem |",
        "|---|---|---|---|---|---|",
    ]
    for target in dict.fromkeys(row["target"] for row in rows):
        found = [row for row in rows if row["target"] == target]
        ends = Counter(row["status"] for row in found)
        lines.append(
            f"| {target} | {len(found)} | {sum(not row['steps'] for row in found)} |"
            f" {sum(row['checkpoints'] > 0 for row in found)} |"
            f" {', '.join(f'{status} {count}' for status, count in ends.items())} |"
            f" {sum(bool(row['problems']) for row in found)} |"
        )
    return "\n".join([*lines, "", *_told_problems(rows), ""])


def _cuts(parts: dict[str, list[Row]]) -> str:
    rows = parts.get("power cuts", [])
    if not rows:
        return ""
    cut = [sum(row["lines_cut_off"].values()) for row in rows]
    lines = [
        "## Power cuts",
        "",
        f"{len(rows)} copies of live runs, seed {', '.join(map(str, sorted({row['seed'] for row in rows})))}:"
        f" {sum(row['checkpoints'] > 0 for row in rows)} of"
        f" them with checkpoints, {sum(not row['steps'] for row in rows)} before the first step. Each log"
        " was cut"
        f" at a random byte (that took {statistics.median(cut):g} lines of all logs at the median,"
        f" {max(cut)} at most), what nobody had synced was cut or removed. Of what was left every whole"
        " line was"
        " read, every checkpoint that the record names was read to its last byte, and fold, report, replay,"
        f" export and a command opened it; {sum(bool(row['problems']) for row in rows)} had a problem.",
        "",
    ]
    return "\n".join([*lines, *_told_problems(rows)])


def _soak(parts: dict[str, list[Row]]) -> str:
    rows = {row["figure"]: row for row in parts.get("soak", [])}
    lines = ["## Soak", ""]
    day, steps = rows.get("a day at 10 Hz"), rows.get("100,000 steps under a supervisor")
    if day is not None:
        hours = day["by_hour"]
        lines += [
            f"{day['hours']:g} h of recorded time, 8 GPUs sampled 10 times a second and a step of 8 ranks"
            " each"
            f" second, replayed in {day['seconds'] / 60:.0f} minutes with the monitor open:",
            "",
            "| recorded hour | monitor, resident | its open files | writer, thinner and fold, resident |"
            " their open"
            " files | record |",
            "|---|---|---|---|---|---|",
        ]
        chosen = sorted({0, 1, 5, 11, 17, len(hours) - 1} & set(range(len(hours))))
        for at in chosen:
            hour = hours[at]
            lines.append(
                f"| {hour['hour']:g} | {format_bytes(hour['viewer_rss_bytes'])} | {hour['viewer_files']} |"
                f" {format_bytes(hour['own_rss_bytes'])} | {hour['own_files']} |"
                f" {format_bytes(hour['record_bytes'])} |"
            )
        agreed = "; ".join(day["problems"]) or (
            "steps, samples, tokens and times that the live reader counted, and those that a fresh"
            " reader finds"
            " in what is left of the record, are those that were written"
        )
        lines += ["", f"Drift: {agreed}.", ""]
    if steps is not None:
        rss = ", ".join(format_bytes(size) for size in steps["supervisor_rss_bytes"])
        lines += [
            f"{steps['steps']:,} steps of {steps['ranks']} ranks under a supervisor, in"
            f" {steps['seconds']:.0f} s:"
            f" the longest log had {format_bytes(steps['largest_log_bytes'])} at most while they wrote as"
            " fast as"
            f" they could, and {format_bytes(steps['log_bytes_at_end'])} at the end; the supervisor held"
            f" {rss} at a"
            " quarter, at the end and at most. "
            + ("; ".join(steps["problems"]) or "Every step is counted, and report, replay and export read it")
            + ".",
            "",
        ]
    return "\n".join(lines) if len(lines) > 2 else ""


def _real_steps(parts: dict[str, list[Row]]) -> str:
    found = parts.get("real steps", [])
    if not found:
        return ""
    (row,) = found
    took = f"{row['step_seconds'] * 1e3:.2g} ms a step at the median"
    lines = [
        f"{row['steps']:,} steps of a rank that trains (DeepSpeed on the CPU, {took}, a checkpoint after each"
        f" eighth of them), in {row['seconds'] / 60:.0f} minutes:",
        "",
        "| step | supervisor, resident | its open files | rank, resident | its open files | logs | record |",
        "|---|---|---|---|---|---|---|",
    ]
    for tenth in row["by_tenth"]:
        sizes = {key: format_bytes(value) for key, value in tenth.items() if key.endswith("_bytes")}
        cells = (
            f"{tenth['step']:,}",
            *(sizes["supervisor_rss_bytes"], tenth["supervisor_files"]),
            *(sizes["rank_rss_bytes"], tenth["rank_files"]),
            *(sizes["log_bytes"], sizes["record_bytes"]),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    whole = (
        "Every step is counted, each checkpoint that is kept is whole, and report, replay and export read it"
    )
    lines += [
        "",
        f"Its log had {format_bytes(row['largest_log_bytes'])} at most. The record is without checkpoints;"
        f" at the end it had {format_bytes(row['record_bytes'])}. {'; '.join(row['problems']) or whole}.",
        "",
    ]
    return "\n".join(lines)


def _told_problems(rows: list[Row]) -> list[str]:
    return [f"- number {row['number']}: {'; '.join(row['problems'])}" for row in rows if row["problems"]]
