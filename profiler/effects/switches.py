"""The switches of a run: asked for, really on, and what each changed on this machine.

A change is measured against another run of the runs folder that differs in that one switch alone: same
model, device, ranks, sequence length and every other option that a step depends on. `read_others` reads
those runs, which takes a while; `switches` is arithmetic over what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import fields, replace

from llmtop.presets.errors import LlmtopError
from llmtop.presets.liger import in_order, kernels_on
from llmtop.presets.rules import refusals
from llmtop.presets.spec import RunOptions, RunSpec
from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.effects import evidence
from llmtop.profiler.effects.evidence import Evidence
from llmtop.profiler.effects.load import load_words, others_percent
from llmtop.profiler.fold.rankstate import WARMUP_STEPS, RankState
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.fold.series import (
    ENOUGH_STEPS,
    MiddleHalf,
    mean_rate,
    middle_half,
    steady_steps,
    within_noise,
)
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir, list_runs

FEW_STEPS = 10
"""Fewer tell no difference of a few percent."""
MOST_TRIED = 8
"""Runs whose logs are read for one switch, until one of them measured something here."""


def _liger(spec: RunSpec) -> str:
    return ", ".join(in_order(kernels_on(spec))) or "off"


def _offload(spec: RunSpec) -> str:
    places = {"optimizer": spec.options.offload_optimizer, "parameters": spec.options.offload_param}
    return ", ".join(f"{what} on {where}" for what, where in places.items() if where != "none") or "off"


def _checkpointing(spec: RunSpec) -> str:
    options = spec.options
    if not options.gradient_checkpointing:
        return "off"
    words = "reentrant" if options.checkpointing_reentrant else "on"
    every = options.checkpointing_every
    return words if every == 1 else f"{words}, 1 layer in {every}"


def _lora(spec: RunSpec) -> str:
    options = spec.options
    return f"rank {options.lora_rank} on {options.lora_targets}" if options.lora_rank else "off"


def _quantization(spec: RunSpec) -> str:
    """Packed weights and rounding in training exclude each other."""
    options = spec.options
    return f"training for {options.qat}" if options.qat != "none" else options.quantization


class SwitchRow(NamedTuple):
    """One switch: the options that make it up, how its setting reads, what shows that it is on."""

    key: str
    label: str
    options: tuple[str, ...]
    setting: Callable[[RunSpec], str]
    evidence: Callable[[RunSpec, RankState | None], Evidence]
    off: dict[str, Any]
    """The options of a run without it, which a prediction is compared with."""


def _option(name: str) -> Callable[[RunSpec], str]:
    return lambda spec: str(getattr(spec.options, name))


SWITCHES: tuple[SwitchRow, ...] = (
    SwitchRow(
        "zero", "ZeRO", ("zero",), lambda spec: f"stage {spec.options.zero}", evidence.zero, {"zero": 0}
    ),
    SwitchRow(
        "offload",
        "offload",
        ("offload_optimizer", "offload_param", "nvme_path"),
        _offload,
        evidence.offload,
        {"offload_optimizer": "none", "offload_param": "none"},
    ),
    SwitchRow(
        "precision",
        "precision",
        ("precision",),
        _option("precision"),
        evidence.precision,
        {"precision": "fp32"},
    ),
    SwitchRow(
        "attention",
        "attention",
        ("attention",),
        _option("attention"),
        evidence.attention,
        {"attention": "eager"},
    ),
    SwitchRow(
        "liger",
        "Liger",
        ("liger", "liger_kernels"),
        _liger,
        evidence.liger,
        {"liger": False, "liger_kernels": "all"},
    ),
    SwitchRow(
        "checkpointing",
        "checkpointing",
        ("gradient_checkpointing", "checkpointing_reentrant", "checkpointing_every"),
        _checkpointing,
        evidence.checkpointing,
        {"gradient_checkpointing": False, "checkpointing_every": 1},
    ),
    SwitchRow(
        "optimizer",
        "optimizer",
        ("optimizer",),
        _option("optimizer"),
        evidence.optimizer,
        {"optimizer": "adamw"},
    ),
    SwitchRow(
        "quantization",
        "quantization",
        ("quantization", "qat", "qat_group"),
        _quantization,
        evidence.quantization,
        {"quantization": "none", "qat": "none", "qat_group": 32},
    ),
    SwitchRow(
        "lora", "LoRA", ("lora_rank", "lora_alpha", "lora_targets"), _lora, evidence.lora, {"lora_rank": 0}
    ),
    SwitchRow(
        "micro_batch",
        "micro-batch",
        ("micro_batch",),
        _option("micro_batch"),
        evidence.micro_batch,
        {"micro_batch": 1},
    ),
    SwitchRow(
        "grad_accum",
        "accumulation",
        ("grad_accum",),
        _option("grad_accum"),
        evidence.grad_accum,
        {"grad_accum": 1},
    ),
)

_OF_A_SWITCH = frozenset(option for row in SWITCHES for option in row.options)
WITHOUT_EFFECT = frozenset(
    (
        *("steps", "learning_rate", "lr_schedule", "warmup_steps", "weight_decay", "seed"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "data", "text_field", "tokenizer"),
        *(
            "checkpoint_every",
            "keep_checkpoints",
            "save_at_end",
            "classify_every",
            "kernel_profile_step",
            "sample_seconds",
        ),
        *("hang_factor", "hang_floor_seconds"),
        # Looked up already: the spec holds what they led to.
        *("model", "gpu", "deepspeed_config"),
    )
)
"""Options that neither the time nor the memory of a step depends on."""
_ALIKE = tuple(
    option.name
    for option in fields(RunOptions)
    if option.name not in _OF_A_SWITCH and option.name not in WITHOUT_EFFECT
)
"""Options of no switch, also those of a later version: compared runs have them alike."""


class Measured(Struct, frozen=True, kw_only=True):
    """What one run measured."""

    run_id: str
    spec: RunSpec
    host: str
    versions: dict[str, str]
    step_seconds: float | None = None
    """Median after warm-up; None: too few steps."""
    tokens_per_second: float | None = None
    timed_steps: int = 0
    """Those that the step time is taken from."""
    step_spread: MiddleHalf | None = None
    others_percent: float | None = None
    """Of the machine's processors, used by others while it trained."""
    peak_bytes: int | None = None
    """Allocated (CPU: resident), the largest rank."""


class Switch(Struct, frozen=True, kw_only=True):
    key: str
    label: str
    asked: str
    on: bool | None
    """Whether what was asked for runs; None: nothing tells."""
    evidence: str
    is_off: bool = False
    """Asked for nothing: the run is as one without the switch."""
    compared_run: str | None = None
    """The run that differs in this switch alone; None: there is none, and nothing is measured."""
    compared_setting: str | None = None
    """How that run has the switch; without such a run, what the prediction is compared with."""
    step_seconds_change: float | None = None
    """This run's minus the other's."""
    step_percent: float | None = None
    step_within_noise: bool = False
    """The change of the step time is smaller than steps of one run differ."""
    tokens_percent: float | None = None
    peak_bytes_change: int | None = None
    peak_percent: float | None = None
    predicted_bytes_change: int | None = None
    """Of the peak, against `compared_setting`; only where nothing was measured."""
    note: str = ""
    """What is unlike in the other run besides the switch."""


def measure(run_id: str, spec: RunSpec, state: RunState, prediction: Prediction) -> Measured:
    steady = steady_steps(state.setting_series, WARMUP_STEPS)
    enough = len(steady) >= ENOUGH_STEPS
    found = breakdown(state, spec, prediction)
    first = state.first
    return Measured(
        run_id=run_id,
        spec=spec,
        host=state.host,
        versions=first.model.versions if first and first.model else {},
        step_seconds=median(seconds for seconds, _ in steady) if enough else None,
        tokens_per_second=mean_rate(steady) if enough else None,
        timed_steps=len(steady),
        step_spread=middle_half(steady),
        others_percent=others_percent(state),
        peak_bytes=None if found.reclaimed else found.actual_peak_bytes,
    )


def differing_switch(spec: RunSpec, other: RunSpec) -> SwitchRow | None:
    """The one switch in which two runs differ; None where they differ in none, in several or in more."""
    if not (spec.is_known and other.is_known):
        return None
    if spec.model != other.model or (spec.gpu.name, spec.gpu.kind) != (other.gpu.name, other.gpu.kind):
        return None
    if any(getattr(spec.options, name) != getattr(other.options, name) for name in _ALIKE):
        return None
    unlike = [row for row in SWITCHES if row.setting(spec) != row.setting(other)]
    return unlike[0] if len(unlike) == 1 else None


def read_others(run: RunDir, host: str) -> tuple[Measured, ...]:
    """For each switch a run beside this one that differs in it alone. Reads every spec, and few logs.

    A run without the switch is preferred, then a newer one.
    """
    spec, candidates = run.spec(), _candidates(run)
    found: list[Measured] = []
    for row in SWITCHES:
        off = row.setting(_without(spec, row))
        ordered = sorted(candidates.get(row.key, []), key=lambda other: row.setting(other.spec()) != off)
        measured = filter(None, (_measured_on(other, host) for other in ordered[:MOST_TRIED]))
        found += [other for other in [next(measured, None)] if other is not None]
    return tuple(found)


def _candidates(run: RunDir) -> dict[str, list[RunDir]]:
    """Switch to the runs that differ in it alone, the newest first, by their specs."""
    found: dict[str, list[RunDir]] = {}
    for other in list_runs(run.path.parent):
        try:
            row = differing_switch(run.spec(), other.spec())
        except LlmtopError:
            continue  # not readable, so it says nothing about this run; `llmtop ls` tells of it
        if row is not None:
            found.setdefault(row.key, []).append(other)
    return found


def _measured_on(run: RunDir, host: str) -> Measured | None:
    """What a run measured; None where that was on another machine, is nothing, or cannot be read."""
    try:
        measured = measure(run.run_id, run.spec(), read_state(run, looks_for_left=False), run.prediction())
    except LlmtopError:
        return None
    has_figures = measured.step_seconds is not None or measured.peak_bytes is not None
    return measured if measured.host == host and has_figures else None


def _without(spec: RunSpec, row: SwitchRow) -> RunSpec:
    return replace(spec, options=replace(spec.options, **row.off))


def switches(own: Measured, rank: RankState | None, others: Iterable[Measured]) -> tuple[Switch, ...]:
    """Every switch of a run, with the others that were read; none of a script that has told nothing."""
    if not own.spec.is_known:
        return ()
    of_switch: dict[str, list[Measured]] = {}
    for other in others:
        row = differing_switch(own.spec, other.spec)
        if row is not None:
            of_switch.setdefault(row.key, []).append(other)
    # Of a script nobody has asked for what was not seen of it.
    rows = [row for row in SWITCHES if any(map(own.spec.knows, row.options))]
    return tuple(_switch(row, own, rank, of_switch.get(row.key, [])) for row in rows)


def _switch(row: SwitchRow, own: Measured, rank: RankState | None, others: list[Measured]) -> Switch:
    seen = row.evidence(own.spec, rank)
    without = _without(own.spec, row)
    asked, off = row.setting(own.spec), row.setting(without)
    plain = Switch(
        key=row.key, label=row.label, asked=asked, on=seen.on, evidence=seen.words, is_off=asked == off
    )
    # Against the run without the switch, if there is one; of several the newest.
    other = next((o for o in others if row.setting(o.spec) == off), others[0] if others else None)
    if other is None:
        predicted = None if plain.is_off else _predicted_change(own.spec, without)
        if predicted is None:
            return plain
        return replace(plain, compared_setting=off, predicted_bytes_change=predicted)
    seconds, seconds_percent = _change(own.step_seconds, other.step_seconds)
    size, size_percent = _change(own.peak_bytes, other.peak_bytes)
    return replace(
        plain,
        compared_run=other.run_id,
        compared_setting=row.setting(other.spec),
        step_seconds_change=seconds,
        step_percent=seconds_percent,
        step_within_noise=within_noise(seconds, own.step_spread, other.step_spread),
        tokens_percent=_change(own.tokens_per_second, other.tokens_per_second)[1],
        peak_bytes_change=None if size is None else round(size),
        peak_percent=size_percent,
        note=_note(own, other),
    )


def _change(own: float | None, other: float | None) -> tuple[float | None, float | None]:
    if own is None or not other:
        return None, None
    return own - other, 100 * (own - other) / other


def _predicted_change(spec: RunSpec, without: RunSpec) -> int | None:
    """What the switch adds to the predicted peak; None where a run without it could not be.

    Both are predicted now: the recorded prediction may be of an older version, which reckoned otherwise.
    """
    if refusals(without):
        return None
    return predict(spec).peak_allocated_bytes - predict(without).peak_allocated_bytes


def _note(own: Measured, other: Measured) -> str:
    unlike = [
        f"{name} {version}"
        for name, version in other.versions.items()
        if own.versions.get(name, version) != version
    ]
    words = [f"it ran with {', '.join(unlike)}"] if unlike else []
    if min(own.timed_steps, other.timed_steps) < FEW_STEPS:
        words.append("few steps: small differences are noise")
    if unlike_load := load_words(own.others_percent, other.others_percent):
        words.append(f"the step time may be the machine's load: here and there {unlike_load}")
    return "; ".join(words)
