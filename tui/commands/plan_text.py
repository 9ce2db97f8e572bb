"""A prediction as text that a person reads: verdict, moments by component, host, ways out, assumptions."""

from __future__ import annotations

from collections.abc import Iterator

from llmtop.presets.cautions import cautions
from llmtop.presets.inputs import inputs
from llmtop.presets.liger import liger_text
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.memory.predict import IN_PIECES
from llmtop.profiler.memory.result import (
    MOMENT_WORDS,
    Component,
    Moment,
    Prediction,
    Suggestion,
    is_short,
    short_words,
)
from llmtop.profiler.units import (
    counted,
    format_bytes,
    format_count,
    format_range,
    format_seconds,
    format_tokens_rate,
)
from llmtop.tui.commandline.options import change_text
from llmtop.tui.commands.output import WIDTH, option_lines, short_path, table, value_text, wrapped

_HEADS: dict[Moment, str] = {
    Moment.INIT: "init",
    Moment.FORWARD_END: "forward",
    Moment.LOSS_BACKWARD: "loss bwd",
    Moment.LAST_BLOCK_BACKWARD: "last bwd",
    Moment.FIRST_BLOCK_BACKWARD: "first bwd",
    Moment.OPTIMIZER_STEP: "step",
    Moment.STEADY: "between",
}

_COUNTED = "The verdict counts what is allocated, with a margin, and what lies outside the allocator."
_CACHE = (
    "Reserved and on device hold freed memory too, which the allocator gives back before memory runs out."
)
_BEYOND = (
    "Reserved and on device are more than there is: the allocator gives back what is free as a whole, and"
)


def plan_text(
    spec: RunSpec, prediction: Prediction, width: int = WIDTH, host_limit_bytes: int | None = None
) -> str:
    """The whole answer of `plan`, in lines of at most `width` columns, long paths aside.

    `host_limit_bytes`: the memory of the machine that it would be on; None where nobody asks for more.
    """
    sections = (
        _what(spec, prediction, width),
        _verdict(spec, prediction, width, host_limit_bytes),
        caution_lines(spec, width),
        _moments(spec, prediction, width),
        _host(prediction, width),
        _suggestions(spec, prediction, width, host_limit_bytes),
        _assumptions(prediction, width),
        input_lines(spec, width),
        _origins(spec, width),
    )
    return "\n\n".join("\n".join(section) for section in map(list, sections) if section)


def verdict_line(spec: RunSpec, prediction: Prediction, host_limit_bytes: int | None = None) -> str:
    """The verdict in one line, with the two figures that it compares."""
    line = _gpu_verdict(spec, prediction)
    if not is_short(prediction.host_bytes, host_limit_bytes):
        return line
    short = short_words(prediction.host_bytes, host_limit_bytes)
    return f"{line}; {short}" if prediction.fits is False else f"verdict: does not fit, {short}"


def _gpu_verdict(spec: RunSpec, prediction: Prediction) -> str:
    place = "the machine" if spec.on_cpu else "each GPU"
    need = format_bytes(prediction.needed_bytes)
    have = format_bytes(prediction.device_memory_bytes)
    if prediction.fits is None:
        return f"verdict: n/a, the memory of {spec.gpu.name} is not known; {place} needs up to {need}"
    if prediction.tight:
        return f"verdict: fits, but tight: {place} needs up to {need} of {have}"
    if prediction.fits:
        return f"verdict: fits, {place} needs up to {need} of {have}"
    return f"verdict: does not fit, {place} needs up to {need} and there is {have}"


def place_of(spec: RunSpec) -> str:
    """What holds one rank's bytes."""
    return "process" if spec.on_cpu else "GPU"


def _what(spec: RunSpec, prediction: Prediction, width: int) -> Iterator[str]:
    o = spec.options
    gpus = f"{o.nodes} nodes of {o.gpus}" if o.nodes > 1 else str(o.gpus)
    if spec.has_uneven_nodes:
        gpus = f"{o.nodes} nodes, in all {spec.world_size}"
    trained = "every weight trained"
    if prediction.trainable_params != prediction.params:
        trained = f"{format_count(prediction.trainable_params)} trained"
    here = spec.provenance["gpu"].source is ValueSource.MACHINE
    none = " (this machine has no GPU)" if here and spec.on_cpu else ""
    title = f"{spec.name}: {spec.model.name} on {gpus} x {spec.gpu.name}{none}, ZeRO-{o.zero}"
    yield from wrapped(title, "", width)
    extras: list[str] = [o.precision, o.attention, o.optimizer]
    extras += [f"lora rank {o.lora_rank}"] if o.lora_rank else []
    extras += [o.quantization] if o.quantization != "none" else []
    extras += [f"training for {o.qat}"] if o.qat != "none" else []
    extras += [_checkpointing(spec)] if o.gradient_checkpointing else []
    extras += [f"optimizer on {o.offload_optimizer}"] if o.offload_optimizer != "none" else []
    extras += [f"parameters on {o.offload_param}"] if o.offload_param != "none" else []
    extras += [liger_text(spec)] if o.liger else []
    yield from wrapped(", ".join(extras), "  ", width)
    yield f"  {format_count(prediction.params)} parameters ({prediction.params:,}), {trained}"
    yield from wrapped(
        f"{spec.tokens_per_step:,} tokens a step: micro-batch {o.micro_batch} x {o.seq_len:,} tokens"
        f" x {o.grad_accum} accumulated x {counted(spec.world_size, 'rank')}",
        "  ",
        width,
    )


def _checkpointing(spec: RunSpec) -> str:
    o = spec.options
    kind = "reentrant gradient checkpointing" if o.checkpointing_reentrant else "gradient checkpointing"
    return kind if o.checkpointing_every == 1 else f"{kind} of one layer in {o.checkpointing_every}"


def input_lines(spec: RunSpec, width: int = WIDTH) -> Iterator[str]:
    """What the run would start from."""
    found = inputs(spec)
    yield "what it starts from"
    for name in found.__struct_fields__:
        yield from wrapped(getattr(found, name), f"  {name:<11}", width)


def _verdict(
    spec: RunSpec, prediction: Prediction, width: int, host_limit_bytes: int | None
) -> Iterator[str]:
    low, high = prediction.peak_reserved_bytes
    yield from wrapped(verdict_line(spec, prediction, host_limit_bytes), "", width)
    moment = MOMENT_WORDS[prediction.peak_moment]
    yield f"  peak allocated  {format_bytes(prediction.peak_allocated_bytes)} ({moment})"
    yield f"  peak reserved   {format_range(format_bytes(low), format_bytes(high))}"
    yield f"  peak on device  {format_bytes(prediction.peak_device_bytes)}"
    need, most = prediction.needed_bytes, max(high, prediction.peak_device_bytes or 0)
    if need is not None and most > need and not spec.on_cpu:
        pieces = _in_pieces(prediction)
        yield from wrapped(f"{_COUNTED} {f'{_BEYOND} {pieces}.' if pieces else _CACHE}", "  ", width)
    if need is not None and spec.on_cpu:
        yield from wrapped(_kept_by_the_heap(spec, prediction), "  ", width)
    if prediction.step_seconds is None or prediction.tokens_per_second is None:
        yield "  time            n/a"
        return
    yield (
        f"  time            {format_seconds(prediction.step_seconds)} a step,"
        f" {prediction.tokens_per_second:,.0f} tokens a second"
    )


def _kept_by_the_heap(spec: RunSpec, prediction: Prediction) -> str:
    """What lies between the table of a process and the verdict on the machine."""
    likely, most = prediction.peak_reserved_bytes
    kept = format_bytes(likely - prediction.peak_allocated_bytes)
    ranks = "" if spec.options.gpus == 1 else f" of each of {spec.options.gpus} processes"
    return (
        f"The verdict counts {format_bytes(most)}{ranks}: the peak of the table below, {kept} of freed memory"
        " that the heap keeps in pieces, which the table leaves out, and"
        f" {format_bytes(most - likely)} of margin."
    )


def _in_pieces(prediction: Prediction) -> str:
    """Why a run that fits may run out all the same; empty where nothing speaks for it."""
    return next((told for told in prediction.assumptions if told.startswith(IN_PIECES)), "")


def _moments(spec: RunSpec, prediction: Prediction, width: int) -> Iterator[str]:
    """Components down, moments across, one unit for the whole table so that columns add up by eye."""
    largest = max((moment.total_bytes for moment in prediction.moments), default=0)
    unit, name = (1 << 30, "GiB") if largest >= 1 << 30 else (1 << 20, "MiB")
    present = [c for c in Component if any(c in moment.components for moment in prediction.moments)]
    columns = [["", name, *(c.replace("_", " ") for c in present), "total", ""]]
    for moment in prediction.moments:
        first, _, second = _HEADS[moment.name].rpartition(" ")
        cells = [_cell(moment.components.get(component), unit) for component in present]
        peak = "peak" if moment.name == prediction.peak_moment else ""
        columns.append([first, second, *cells, _cell(moment.total_bytes, unit), peak])
    yield f"one {place_of(spec)}, by moment of a step"
    for part in _fitting(columns, width - 2):
        rows = list(zip(*part, strict=True))
        for line in table(rows, right=range(1, len(part))):
            if line:
                yield f"  {line}"


def _fitting(columns: list[list[str]], width: int) -> Iterator[list[list[str]]]:
    """The columns in as many tables as the width asks for, each beginning with the first column."""
    names, *others = columns
    used, part = max(map(len, names)), [names]
    for column in others:
        wide = 2 + max(map(len, column))
        if used + wide > width and len(part) > 1:
            yield part
            used, part = max(map(len, names)), [names]
        part.append(column)
        used += wide
    yield part


def _cell(value: int | None, unit: int) -> str:
    return "" if value is None else f"{value / unit:.2f}"


def caution_lines(spec: RunSpec, width: int = WIDTH, *, launching: bool = False) -> Iterator[str]:
    """What is not wrong, and likely not meant."""
    for caution in cautions(spec, launching=launching):
        yield from wrapped(caution, "note: ", width)


def _host(prediction: Prediction, width: int) -> Iterator[str]:
    host = prediction.host
    yield from wrapped(
        f"one node: host memory {format_bytes(host.total_bytes)},"
        f" of it pinned {format_bytes(host.pinned_bytes)}; NVMe {format_bytes(host.nvme_bytes)}",
        "",
        width,
    )
    for name, size in host.components.items():
        yield f"  {name:<24}{format_bytes(size)}"


def _suggestions(
    spec: RunSpec, prediction: Prediction, width: int, host_limit_bytes: int | None
) -> Iterator[str]:
    if not prediction.suggestions:
        return
    some_fit = any(
        suggestion.fits and not is_short(suggestion.host_bytes, host_limit_bytes)
        for suggestion in prediction.suggestions
    )
    lower = "ways to make it fit" if some_fit else "nothing here makes it fit; these need less"
    head = "with the room there is" if prediction.fits else lower
    place, before = "machine" if spec.on_cpu else "GPU", format_bytes(prediction.needed_bytes)
    # The figure of the verdict: another one could lie below the limit and still not fit.
    yield from wrapped(f"{head} (what the {place} needs up to, now -> then)", "", width)
    for number, suggestion in enumerate(prediction.suggestions, 1):
        need = f"{place} {before} -> {format_bytes(suggestion.needed_bytes)}"
        after = _verdict_of(suggestion, host_limit_bytes)
        rate = suggestion.tokens_per_second
        speed = "" if rate is None else format_tokens_rate(rate)
        text = f"{suggestion.text}: {', '.join(filter(None, (need, suggestion.host_words, after, speed)))}"
        yield from wrapped(text, f"  {number}. ", width)
        yield from option_lines(change_text(spec, suggestion.change), "     ", width)


def _verdict_of(suggestion: Suggestion, host_limit_bytes: int | None) -> str:
    if suggestion.fits and is_short(suggestion.host_bytes, host_limit_bytes):
        return f"does not fit the {format_bytes(host_limit_bytes)} here"
    if not suggestion.fits:
        return "does not fit yet"
    return "fits, but tight" if suggestion.tight else "fits"


def _assumptions(prediction: Prediction, width: int) -> Iterator[str]:
    # What speaks against the verdict stands beside it.
    told = [assumption for assumption in prediction.assumptions if not assumption.startswith(IN_PIECES)]
    if told:
        yield "taken for granted"
    for assumption in told:
        yield from wrapped(assumption, "  - ", width)


def _origins(spec: RunSpec, width: int) -> Iterator[str]:
    """Where each value came from that is not the plain default, a line for each place."""
    by_place: dict[str, list[str]] = {}
    for key, origin in spec.provenance.items():
        if origin.source is ValueSource.COMMAND_LINE:
            typed = by_place.setdefault("command line", [])
            typed += [origin.detail] if origin.detail not in typed else []
        elif origin.source is not ValueSource.DEFAULT or origin.detail:
            value = _value(spec, key)
            settings = by_place.setdefault(origin.detail or origin.source, [])
            settings += [f"{key} {value_text(value)}"] if not isinstance(value, dict) else []
    yield "where the values come from (all others are defaults)"
    yield from wrapped(f"{short_path(spec.model_source)}: the model's shape", "  ", width)
    for place, settings in by_place.items():
        yield from option_lines(f"{short_path(place)}: {', '.join(settings)}", "  ", width)


def _value(spec: RunSpec, key: str) -> object:
    """The value of an option, or of a raw DeepSpeed key by its dotted path."""
    head, *rest = key.split(".")
    value = getattr(spec.options, head)
    for part in rest:
        value = value[part]
    return value
