"""What `docs/accuracy.md` says of rows that others have published, and of reports of users."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.accuracy.lengths import orders_of_a_row
from benchmarks.accuracy.published import Case, LeftOut, Published, differences
from benchmarks.accuracy.text import held, table
from benchmarks.stats import percentile

_MEDIAN_PERCENT, _P90_PERCENT = 5.0, 12.0


def published_words(published: Sequence[Published], left_out: Sequence[LeftOut]) -> Iterator[str]:
    known = [each for each in published if each.percent is not None]
    died = [each for each in published if each.row["outcome"] == "oom"]
    if known:
        yield _published_goal(known, died)
    yield table(("code", "rows", "by today's formulas", "with its own code"), _by_code(known))
    yield table(("difference", "rows", "why", "read in"), _differences(published))
    yield (
        "Each with its source in `benchmarks/data/published.jsonl`; *reserved* is judged by what is likely. "
        "*Then* is with the differences of its own code:"
    )
    yield table(
        ("row", "metric", "error", "then", "of", "why it differs", "not known"),
        (
            (
                each.row["id"],
                each.row["metric"],
                f"{each.percent:+.1f} %",
                _then(each),
                each.name,
                each.row["note"],
                each.row["missing"],
            )
            for each in sorted(known, key=lambda each: -abs(each.mended_percent or 0.0))
        ),
    )
    yield table(
        ("out of memory", "by today's formulas", "with its own code", "run", "note"),
        (
            (
                each.row["id"],
                _refusal(each.refused),
                _refusal(each.mended_refused),
                each.name,
                each.row["note"],
            )
            for each in died
        ),
    )
    count = sum(len(each.rows) for each in left_out)
    yield f"Left out are {count} rows:"
    lines = [f"- {each.why} ({len(each.rows)}: {', '.join(each.rows)})" for each in left_out]
    yield "\n".join(lines)


def _then(each: Published) -> str:
    if each.mended_percent is None or not each.row["differs"]:
        return ""
    low, high = each.mended_range or (0.0, 0.0)
    error = f" ± {each.mended_error:.1f}" if each.mended_error is not None else ""
    between = f" ({low:+.0f} to {high:+.0f})" if each.mended_range else ""
    return f"{each.mended_percent:+.1f}{error} %{between}"


def _published_goal(known: Sequence[Published], died: Sequence[Published]) -> str:
    """Both figures, and the goal held against the one that is of the code that ran."""
    plain = [abs(each.percent) for each in known if each.percent is not None]
    own = [abs(each.mended_percent) for each in known if each.mended_percent is not None]
    median, p90 = statistics.median(own), percentile(own, 0.9)
    refused = sum(each.mended_refused is True for each in died)
    return (
        f"{len(known)} rows with a known metric can be said in our options. None of them ran on the versions "
        f"that the formulas follow: by today's the median is {statistics.median(plain):.1f} %, the 90th "
        f"percentile {percentile(plain, 0.9):.1f} %, and of {len(died)} rows that ran out of memory "
        f"{sum(each.refused is True for each in died)} are refused as too large. With what the code that ran "
        f"is known to have kept otherwise: median {median:.1f} % (goal {_MEDIAN_PERCENT:g} %: "
        f"{held(median <= _MEDIAN_PERCENT)}), 90th percentile {p90:.1f} % (goal {_P90_PERCENT:g} %: "
        f"{held(p90 <= _P90_PERCENT)}), {refused} of {len(died)} refused (goal all: "
        f"{held(refused == len(died))}). {_by_ranges(known)} That code was read after the disagreements had "
        "been seen; nothing of it is fitted: each difference is counted from the model's shape, or simulated "
        "from the lengths that its page tells:"
    )


def _by_ranges(known: Sequence[Published]) -> str:
    """What an honest answer to an order that nobody knows is worth: the range of all that were simulated."""
    ranged = [each for each in known if each.mended_range is not None]
    inside = [each for each in ranged if _outside_range(each) == 0.0]
    outside = [_outside_range(each) for each in known if each.mended_percent is not None]
    p90 = percentile(outside, 0.9)
    return (
        f"Of {len(ranged)} rows the samples came in an order that no page tells; each has the median of "
        f"{orders_of_a_row()} simulated orders, with its standard error. {len(inside)} of their "
        "figures lie between the least and the most that the simulated orders held. Were such a row counted "
        f"by how far it lies outside that range, the 90th percentile would be {p90:.1f} %; the goal as it is "
        "worded is of single figures."
    )


def _outside_range(each: Published) -> float:
    """Percent from the nearer end of its range; of a row without one its error."""
    low, high = each.mended_range or (each.mended_percent or 0.0,) * 2
    return max(low, -high, 0.0)


def _differences(rows: Sequence[Published]) -> Iterator[tuple[str, ...]]:
    for told in differences():
        name = str(told["name"])
        having = ", ".join(each.row["id"] for each in rows if name in each.row["differs"])
        yield name, having, str(told["why"]), str(told["source"])


def _by_code(known: Sequence[Published]) -> Iterator[tuple[str, ...]]:
    for code in sorted({str(each.row["group"]) for each in known}):
        of_code = [each for each in known if each.row["group"] == code]
        plain = statistics.median(abs(each.percent or 0.0) for each in of_code)
        own = statistics.median(abs(each.mended_percent or 0.0) for each in of_code)
        yield code, str(len(of_code)), f"median {plain:.1f} %", f"median {own:.1f} %"


def _refusal(refused: bool | None) -> str:
    if refused is None:
        return "not decided: refused for another reason"
    return "too large" if refused else "**fits**"


def cases_words(cases: Sequence[Case]) -> Iterator[str]:
    agree = sum(case.agrees for case in cases)
    yield (
        f"{len(cases)} reports of users give enough to decide, or enough to decide with the least that they "
        f"can have meant. The verdict agrees with {agree}; the others are explained."
    )
    yield table(
        ("report", "happened", "verdict", "run", "taken where not given", "agrees"),
        (
            (
                f"{case.row['id']} {case.row['thread']}",
                case.row["happened"],
                case.said.splitlines()[0],
                case.name,
                case.row["taken"] or "nothing",
                "yes" if case.agrees else f"**no**: {case.row['explained'] or 'not explained'}",
            )
            for case in cases
        ),
    )
