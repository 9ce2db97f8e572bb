"""A run in lines of plain ASCII, for logs and dumb terminals: one a second, and each finding as it comes."""

from __future__ import annotations

import time
from collections.abc import Iterator

from llmtop.presets.errors import ExitCode
from llmtop.profiler.breakdown import process_peaks
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fleet.part import part_in_lines
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.remote import name_here
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import (
    NOT_AVAILABLE,
    format_bytes,
    format_progress,
    format_range,
    format_seconds,
    format_tokens_rate,
)
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.follow import end_in_words, require_success
from llmtop.tui.commands.follow_hosts import LinkNarrator
from llmtop.tui.looks.glyphs import to_ascii

_MOST_DEVICES = 16
"""Told one by one; of more the smallest and the largest."""


class PlainTeller:
    """Lines for the states of one run; remembers which findings were told."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._told: dict[str, str] = {}

    def lines(self, state: RunState, now: float) -> Iterator[str]:
        yield to_ascii(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}  {self._figures(state)}")
        yield from map(to_ascii, self._news(state))

    def _figures(self, state: RunState) -> str:
        setting = state.changes.setting
        planned = self._run.spec(setting).steps_planned
        parts = [state.status.replace("_", " ")]
        if state.status == "starting" and (rank := state.first) is not None and rank.stages:
            parts.append(rank.stages[-1].stage.replace("_", " "))
        # What an earlier process has measured is not true of one that goes on.
        known = state.present_loss
        loss = NOT_AVAILABLE if known is None else f"{known:.4f}"
        rates = state.speed_series.tokens_per_second
        parts += [
            self._step(state, planned),
            f"loss {loss}",
            # Of the first steps, and of a script whose batches are no tokens, there is none.
            *([format_tokens_rate(rates[-1])] if rates and rates[-1] is not None else []),
            self._memory(state, setting),
        ]
        if state.hang_seconds is not None:
            parts.append(f"no step for {format_seconds(state.hang_seconds)}")
        return "  ".join(parts)

    def _step(self, state: RunState, planned: int | None) -> str:
        step = state.present_step
        if state.is_beginning and step:
            return f"after step {format_progress(step, planned)}"  # it is not made again
        return f"step {format_progress(step, planned)}"

    def _memory(self, state: RunState, setting: int) -> str:
        """Of each GPU, or on the CPU kind of each rank's process."""
        spec = self._run.spec(setting)
        if spec.on_cpu:
            what, held = "rank", dict[int, int | None](process_peaks(state, spec))
        else:
            devices = state.hardware.devices if state.hardware is not None else ()
            what, held = "GPU", {device.index: device.memory_used_bytes for device in devices}
        if not held:
            return f"memory {NOT_AVAILABLE}"
        if len(held) > _MOST_DEVICES:
            known = [size for size in held.values() if size is not None]
            low, high = min(known, default=None), max(known, default=None)
            between = format_range(format_bytes(low), format_bytes(high))
            each = "" if format_bytes(low) != format_bytes(high) else "each of "
            return f"memory {between} on {each}{len(held)} {what}s"
        return "memory " + " ".join(
            f"{what}{number} {format_bytes(size)}" for number, size in sorted(held.items())
        )

    def _news(self, state: RunState) -> Iterator[str]:
        """Findings that were not there before, and those that have gone."""
        setting = state.changes.setting
        found = {f.key: f for f in findings(state, self._run.spec(setting), self._run.prediction(setting))}
        for key, finding in found.items():
            if key not in self._told:
                change = f"; {finding.change}" if finding.change else ""
                yield f"  {finding.severity}: {finding.title} ({finding.evidence}){change}"
        for key in self._told.keys() - found.keys():
            yield f"  no longer: {self._told[key]}"
        self._told = {key: finding.title for key, finding in found.items()}


def plain_to_end(run: RunDir, every_seconds: float) -> ExitCode:
    """Print the run on stdout until it ends; raises when it failed. Ctrl-C leaves the run going."""
    reader, teller = RunReader(part_in_lines(run)), PlainTeller(run)
    due, link = time.monotonic(), LinkNarrator(run)
    try:
        while True:
            state = reader.poll()
            for line in teller.lines(state, time.time()):
                print(line, flush=True)
            for line in link.lines():
                print(to_ascii(f"  {line}"), flush=True)
            if state.status in ENDED:
                break
            due = max(due + every_seconds, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
    except KeyboardInterrupt:
        name = name_here(run.path)
        tell(f"the run goes on: llmtop attach {name}, llmtop stop {name}")
        raise
    code = require_success(run, state)
    print(to_ascii(end_in_words(state)), flush=True)
    return code
