"""Findings about switches that were asked for and that the modules and kernels do not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llmtop.presets.spec import RunSpec
from llmtop.profiler.effects import evidence
from llmtop.profiler.effects.evidence import Evidence
from llmtop.profiler.findings.finding import Finding, Rule, Seen
from llmtop.profiler.fold.rankstate import RankState

_Look = Callable[[RunSpec, RankState | None], Evidence]


def attention_not_on(seen: Seen) -> Iterator[Finding]:
    asked = seen.spec.options.attention
    if asked == "sdpa":
        change = (
            "masks, dropout, head sizes and types that no fused kernel takes make torch compute it by hand"
        )
    elif asked == "eager":
        change = "its code has another attention; compare with this in mind"
    else:
        change = f"check that the package of {asked} is the one for this GPU: llmtop doctor"
    yield from _not_on(seen, "attention", f"attention {asked}", evidence.attention, change)


def liger_not_on(seen: Seen) -> Iterator[Finding]:
    if seen.spec.options.liger:
        change = "its speed and memory are those without them; another --liger-kernels asks for what there is"
        yield from _not_on(seen, "liger", "a Liger kernel", evidence.liger, change)


def optimizer_not_on(seen: Seen) -> Iterator[Finding]:
    asked = seen.spec.options.optimizer
    change = "another optimizer trains, with other states: see the DeepSpeed configuration of the run"
    yield from _not_on(seen, "optimizer", f"optimizer {asked}", evidence.optimizer, change)


def quantization_not_on(seen: Seen) -> Iterator[Finding]:
    asked = seen.spec.options.quantization
    if asked != "none":
        change = "the weights may not be packed: the memory panel shows what they hold"
        yield from _not_on(seen, "quantization", f"quantization {asked}", evidence.quantization, change)


def checkpointing_not_on(seen: Seen) -> Iterator[Finding]:
    if seen.spec.options.gradient_checkpointing:
        change = "nothing is recomputed, so activations are kept whole; the model's code may ignore it"
        yield from _not_on(seen, "checkpointing", "gradient checkpointing", evidence.checkpointing, change)


def _not_on(seen: Seen, key: str, what: str, look: _Look, change: str) -> Iterator[Finding]:
    if seen.spec.script is not None:
        # Its options are what was found in its modules and optimizer: nobody asked for anything else.
        return
    found = look(seen.spec, seen.state.first)
    if found.on is False:
        yield Finding(
            key=f"{key}_not_on",
            severity="warning",
            title=f"{what} was asked for and does not run",
            evidence=found.words,
            change=change,
        )


SEEN_RULES: tuple[Rule, ...] = (
    attention_not_on,
    liger_not_on,
    optimizer_not_on,
    quantization_not_on,
    checkpointing_not_on,
)
