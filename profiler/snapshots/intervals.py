"""Sets of times as sorted intervals that do not touch, in the unit of what they were made of."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
    """Any spans, put together where they overlap."""
    found: Intervals = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(spans: Intervals) -> float:
    return sum(end - begin for begin, end in spans)


def intersection(first: Intervals, second: Intervals) -> Intervals:
    found: Intervals = []
    at = other = 0
    while at < len(first) and other < len(second):
        begin = max(first[at][0], second[other][0])
        end = min(first[at][1], second[other][1])
        if begin < end:
            found.append((begin, end))
        if first[at][1] < second[other][1]:
            at += 1
        else:
            other += 1
    return found
