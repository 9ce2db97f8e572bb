"""Findings about the clocks of hosts: what is shown has times that are not those in their logs."""

from __future__ import annotations

from collections.abc import Iterator

from llmtop.profiler.findings.finding import Finding, Rule, Seen
from llmtop.profiler.record.hostclock import HostClock
from llmtop.profiler.units import counted, format_seconds

SET_TIME = "set the time there with chrony or ntpd, so that logs of other programs agree too"
_MOST_NAMED = 3


def clocks_differ(seen: Seen) -> Iterator[Finding]:
    clocks = seen.state.clocks
    if not clocks:
        return
    worst = sorted(clocks, key=lambda name: -max(abs(one.taken_off_seconds) for one in clocks[name]))
    told = [f"{name}: {_words(clocks[name])}" for name in worst[:_MOST_NAMED]]
    more = [counted(len(worst) - _MOST_NAMED, "more host")] if len(worst) > _MOST_NAMED else []
    yield Finding(
        key="clocks_differ",
        severity="info",
        title=f"the {'clock' if len(worst) == 1 else 'clocks'} of {counted(len(worst), 'host')} "
        f"{'differs' if len(worst) == 1 else 'differ'}, which is corrected",
        evidence="; ".join((*told, *more)) + "; the times shown are without that, the logs keep theirs",
        change=SET_TIME,
    )


def off_words(seconds: float) -> str:
    """How a clock differs from the launching machine's."""
    if not seconds:
        return "as that of the launching machine"
    side = "ahead of" if seconds > 0 else "behind"
    return f"{format_seconds(abs(seconds))} {side} that of the launching machine"


def _words(clock: HostClock) -> str:
    return ", then set to be ".join(off_words(one.taken_off_seconds) for one in clock)


CLOCK_RULES: tuple[Rule, ...] = (clocks_differ,)
