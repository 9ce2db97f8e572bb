"""The best way to make a run fit, in one sentence: where nothing of what was asked about fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmtop.presets.rules import refusals
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.units import format_tokens_rate
from llmtop.tui.commandline.options import change_text


def best_way(spec: RunSpec, asked: RunSpec, settings: Mapping[str, Any], typed: str = "") -> str:
    """Of `spec`, which is `asked` with `settings`; its options are those to add to what was asked,
    beside those `typed` in any case.

    Empty for a run that fits or cannot be judged.
    """
    if refusals(spec):
        return ""
    prediction = predict_with_suggestions(spec)
    if prediction.fits is not False:
        return ""
    way = next((one for one in prediction.suggestions if one.fits), None)
    if way is None:
        return (
            "no other setting was found that fits: llmtop plan shows what needs less,"
            " llmtop plan --where on which GPUs it fits"
        )
    verdict = "fits, but tight" if way.tight else "fits"
    rate = f", {format_tokens_rate(way.tokens_per_second)}" if way.tokens_per_second else ""
    words = f"{typed} {change_text(asked, {**settings, **way.change})}".strip()
    return f"what fits: {way.words}, {verdict}{rate}: {words}; llmtop plan shows every way"
