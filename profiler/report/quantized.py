"""The part of a report about models in fewer bits that were made of the run's weights."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import read_json
from llmtop.profiler.quantized import Quantized
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import NOT_AVAILABLE


class QuantizedReport(Struct, frozen=True, kw_only=True):
    name: str
    """Of the file or folder that was made."""
    made: Quantized | None
    """None where what was kept of it cannot be read."""


def quantized_of(run: RunDir) -> tuple[QuantizedReport, ...]:
    """All that were made, by name."""
    return tuple(
        QuantizedReport(name=path.stem, made=_read(run, path.stem))
        for path in sorted(run.quantized_dir.glob("*.json"))
    )


def _read(run: RunDir, name: str) -> Quantized | None:
    try:
        return read_json(run.quantized_path(name), Quantized)
    except (OSError, msgspec.DecodeError):
        return None


def quantized_lines(found: tuple[QuantizedReport, ...]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """What each is, and rows of what is known of it."""
    # A run of which nothing was made does not wait for it.
    from llmtop.profiler.report.quantizedtext import quantized_head, quantized_rows

    for one in found:
        if one.made is None:
            yield one.name, [("report", f"{NOT_AVAILABLE}: it cannot be read")]
        else:
            yield quantized_head(one.made), list(quantized_rows(one.made))
