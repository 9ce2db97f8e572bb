"""`plan --explain`: each component as a formula with its numbers, and where the rule comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.explain import ExplainedMoment, ExplainedSum, ExplainedTerm, Explanation
from llmtop.profiler.memory.result import MOMENT_WORDS, Moment
from llmtop.profiler.units import counted
from llmtop.tui.commands.output import WIDTH, wrapped
from llmtop.tui.commands.plan_defaults import PEAK

ALL = "all"
WHICH = (PEAK, ALL, *(moment.value for moment in Moment))
"""What may follow `--explain`."""
MOST_TERMS = 6
"""Of one sum that are shown each by itself."""


def check_which(which: str) -> str:
    """The word as it is; raises UsageError for another one than those that may follow."""
    if which not in WHICH:
        raise UsageError(
            f"--explain {which[:80]}: not a moment of a step",
            why=f"it takes {', '.join(WHICH[:-1])} or {WHICH[-1]}",
            fix="--explain all, or nothing after it for the peak; RECIPE goes first",
        )
    return which


def explain_text(spec: RunSpec, explanation: Explanation, which: str, width: int = WIDTH) -> str:
    """The moments asked for, then the verdict's numbers and the host's."""
    shown = [moment for moment in explanation.moments if _is_asked(moment, explanation, which)]
    cited: list[str] = []
    sections = [list(_moment(spec, moment, explanation, cited, width)) for moment in shown]
    sections.append(["the verdict", *_sums(explanation.verdict, cited, width)])
    if explanation.host:
        sections.append(["the host, one node", *_sums(explanation.host, cited, width)])
    sections.append(["where the rules come from", *_cited_lines(cited, width)])
    return "\n\n".join("\n".join(section) for section in sections)


def _is_asked(moment: ExplainedMoment, explanation: Explanation, which: str) -> bool:
    return which == ALL or moment.name == (explanation.peak_moment if which == PEAK else which)


def _moment(
    spec: RunSpec, moment: ExplainedMoment, explanation: Explanation, cited: list[str], width: int
) -> Iterator[str]:
    place = "process" if spec.on_cpu else "GPU"
    peak = ", the peak" if moment.name == explanation.peak_moment else ""
    yield from wrapped(f"one {place}, {MOMENT_WORDS[moment.name]}: {moment.total_bytes:,} B{peak}", "", width)
    yield from _sums(moment.components, cited, width)


def _sums(sums: Sequence[ExplainedSum], cited: list[str], width: int) -> Iterator[str]:
    for one in sums:
        yield from _sum(one, cited, width)


def _sum(one: ExplainedSum, cited: list[str], width: int) -> Iterator[str]:
    name, marks = one.name.replace("_", " "), _marks(one, cited)
    if len(one.terms) == 1:
        yield from wrapped(f"{name} = {_equation(one.terms[0])}{marks}", "  ", width)
        return
    yield from wrapped(f"{name} = {one.value:,} B{marks}, the sum of", "  ", width)
    shown = one.terms if len(one.terms) <= MOST_TERMS + 1 else one.terms[:MOST_TERMS]
    for term in shown:
        label = f"{term.label}: " if term.label else ""
        yield from wrapped(f"{label}{_equation(term)}", "    ", width)
    rest = one.terms[len(shown) :]
    if rest:
        yield f"    {counted(len(rest), 'smaller term')}: {sum(term.value for term in rest):,} B"


def _marks(one: ExplainedSum, cited: list[str]) -> str:
    """The numbers of its sources, each of which is told once, at the end; new ones are put to `cited`."""
    found = dict.fromkeys(part for term in one.terms for part in term.source.split("; ") if part)
    cited += [source for source in found if source not in cited]
    return "".join(f" [{cited.index(source) + 1}]" for source in found)


def _cited_lines(cited: Sequence[str], width: int) -> Iterator[str]:
    for number, source in enumerate(cited, 1):
        yield from wrapped(source, f"  [{number}] ", width)


def _equation(term: ExplainedTerm) -> str:
    value = f"{term.value:,} B"
    return value if term.formula == value else f"{term.formula} = {value}"
