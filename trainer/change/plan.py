"""What a change to a live run comes to, before it is made: the new setting, its prediction and its price.

Pure: the command line and the monitor preview with it what the supervisor then decides with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets import option_values, resolve, rules, zero
from llmtop.presets.errors import DoesNotFitError, UsageError
from llmtop.presets.spec import CHANGING_COMMANDS, Provenance, RunOptions, RunSpec, ValueSource
from llmtop.profiler.memory import flatlimit
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.memory.result import Prediction, is_short, short_words
from llmtop.profiler.record.changeevents import KeyChange
from llmtop.profiler.units import format_bytes
from llmtop.trainer.change.idle import refuse_idle_relaunch
from llmtop.trainer.change.keys import GPUS_OF_HOSTS, RESTAGE, check_key
from llmtop.trainer.change.setwords import as_set_takes_it
from llmtop.trainer.dsconfig import deepspeed_config

BY_SET = CHANGING_COMMANDS[0]
_BATCH = ("micro_batch", "grad_accum")


class ChangePlan(Struct, frozen=True, kw_only=True):
    """A change that can be made, though it may not fit."""

    words: tuple[str, ...]
    """As typed."""
    old: RunSpec
    new: RunSpec
    changes: tuple[KeyChange, ...]
    old_prediction: Prediction
    new_prediction: Prediction
    deepspeed_config: dict[str, Any]
    """Of the new setting."""
    lost: tuple[str, ...] = ()
    """What it costs beyond time."""

    @property
    def restage(self) -> bool:
        """Whether the ranks must be started again; then all keys change together, at that time."""
        return any(change.restage for change in self.changes)


def require_words(words: Sequence[str]) -> None:
    """Raise UsageError for what is no change of any live run: not `key=value`, not a key that can be changed,
    or not a value that it takes."""
    _parsed(words, ended=False)


def plan_change(
    spec: RunSpec,
    prediction: Prediction,
    words: Sequence[str],
    *,
    keep_global_batch: bool = True,
    by: str = BY_SET,
    ended: bool = False,
) -> ChangePlan:
    """What `key=value ...` comes to; raises UsageError for what cannot be, and changes nothing.

    A run that has `ended` can go on with keys that a live one cannot change.
    """
    asked = _parsed(words, ended=ended)
    if "gpus" in asked and spec.options.nodes > 1:
        raise UsageError("gpus of a run over hosts cannot be changed", why=GPUS_OF_HOSTS)
    values = {**asked, **_adapted(spec, asked, keep_global_batch=keep_global_batch)}
    options = replace(spec.options, **values)
    changes = tuple(key_changes(spec.options, options, asked))
    if not changes:
        raise UsageError("nothing would change", why=f"the run has {' '.join(words)} already")
    _refuse_own_schedule(spec, changes)
    new = replace(spec, options=options, provenance=_provenance(spec, changes, by))
    with as_set_takes_it():
        _check(new)
    refuse_idle_relaunch(spec, new, changes)
    return ChangePlan(
        words=tuple(words),
        old=spec,
        new=new,
        changes=changes,
        old_prediction=prediction,
        new_prediction=predict_with_suggestions(new),
        deepspeed_config=deepspeed_config(new),
        lost=tuple(_lost(spec, new)),
    )


def _check(spec: RunSpec) -> None:
    """What a launch refuses too."""
    zero.zero_settings(spec.options.zero, spec.options.deepspeed, spec.model.hidden_size)
    for refusal in rules.refusals(spec):
        raise UsageError(refusal.what, why=refusal.why, fix=refusal.fix)
    flatlimit.check(spec)


def require_fit(plan: ChangePlan, host_limit_bytes: int | None = None) -> None:
    """Raise DoesNotFitError when the new setting is predicted not to fit.

    Also where it needs more host memory than before and than there is: `host_limit_bytes`, of the run's one
    machine; None: not known here.
    """
    prediction = plan.new_prediction
    why = host_shortage(plan, host_limit_bytes)
    if prediction.fits is False:
        why = (
            f"{'the machine' if plan.new.on_cpu else 'each ' + plan.new.gpu.name} would need up to"
            f" {format_bytes(prediction.needed_bytes)}, and there is"
            f" {format_bytes(prediction.device_memory_bytes)}"
        )
    if why:
        raise DoesNotFitError(
            f"{' '.join(plan.words)}: predicted not to fit", why=why, fix="--force changes it all the same"
        )


def host_shortage(plan: ChangePlan, limit_bytes: int | None) -> str:
    """How much more host memory than `limit_bytes`, all there is, a change would take; empty where it would
    not, where it takes no more than the run has already, and where that is not known here."""
    need = plan.new_prediction.host_bytes
    is_asked = not plan.new.on_cpu and plan.new.options.nodes == 1
    if is_asked and need > plan.old_prediction.host_bytes and is_short(need, limit_bytes):
        return short_words(need, limit_bytes)
    return ""


def _parsed(words: Sequence[str], *, ended: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{word}: not of the form KEY=VALUE", fix="for example micro_batch=2")
        first, *below = (part.strip() for part in key.split("."))
        first = first.replace("-", "_")
        name = ".".join((first, *below))
        if other := next((one for one in said if _overlap(name, one)), ""):
            raise UsageError(f"{word}: {name} is told already by {said[other]}", fix="keep one of them")
        said[name] = word
        check_key(first, word, ended=ended)
        values = option_values.merge(values, resolve.parse_set(word, word))
    return values


def _overlap(name: str, other: str) -> bool:
    """Whether they are the same key, or one of them is a table that the other lies in."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


def _adapted(spec: RunSpec, asked: dict[str, Any], *, keep_global_batch: bool) -> dict[str, Any]:
    """Micro-batch or accumulation that follows from the others, so that the global batch stays."""
    options, given = spec.options, [key for key in _BATCH if key in asked]
    if not keep_global_batch or len(given) == 2 or not (given or "gpus" in asked):
        return {}
    ranks = asked["gpus"] * options.nodes if "gpus" in asked else spec.world_size
    whole = spec.global_batch
    keep = "; --keep-global-batch no changes the global batch"
    if whole % ranks:
        near = _nearest_divisor(whole, ranks)
        raise UsageError(
            f"gpus={asked['gpus']}: {ranks} ranks do not divide the global batch of {whole}",
            fix=f"gpus={max(1, near // options.nodes)}{keep}",
        )
    share = whole // ranks
    fixed = given[0] if given else "micro_batch"
    other = _BATCH[1 - _BATCH.index(fixed)]
    size = asked.get(fixed, getattr(options, fixed))
    if share % size:
        near = _nearest_divisor(share, size)
        raise UsageError(
            f"{fixed}={size} does not divide the {share} sequences of each rank in a step",
            why=f"the global batch of {whole} is kept",
            fix=f"{fixed}={near} with {other}={share // near}{keep}",
        )
    return {other: share // size}


def _nearest_divisor(whole: int, wanted: int) -> int:
    divisors = [n for n in range(1, int(whole**0.5) + 1) if whole % n == 0]
    return min([*divisors, *(whole // n for n in divisors)], key=lambda n: (abs(n - wanted), n))


def key_changes(
    old: RunOptions, new: RunOptions, asked: Collection[str] = RunOptions.__struct_fields__
) -> Iterator[KeyChange]:
    """One for each key that differs; those that nobody `asked` for follow from the others."""
    for key in RunOptions.__struct_fields__:
        before, after = getattr(old, key), getattr(new, key)
        if key == "deepspeed":
            yield from _raw_changes(before, after, key)
        elif before != after:
            yield KeyChange(key=key, old=before, new=after, restage=key in RESTAGE, adapted=key not in asked)


def _raw_changes(old: Any, new: Any, path: str) -> Iterator[KeyChange]:
    """The leaves of raw DeepSpeed keys that differ."""
    if isinstance(new, dict) and (old is None or isinstance(old, dict)):
        for key, value in new.items():
            yield from _raw_changes((old or {}).get(key), value, f"{path}.{key}")
    elif old != new:
        yield KeyChange(key=path, old=old, new=new, restage=True)


def _provenance(spec: RunSpec, changes: Sequence[KeyChange], by: str) -> dict[str, Provenance]:
    came_from = Provenance(source=ValueSource.COMMAND_LINE, detail=by)
    return {**spec.provenance, **{change.key: came_from for change in changes}}


def _refuse_own_schedule(spec: RunSpec, changes: Sequence[KeyChange]) -> None:
    if "scheduler" in spec.options.deepspeed and any(c.key == "learning_rate" for c in changes):
        raise UsageError(
            "learning_rate of a run with deepspeed.scheduler cannot be changed",
            why="that schedule has rates of its own",
        )


def _lost(old: RunSpec, new: RunSpec) -> Iterator[str]:
    before, after = old.options, new.options
    if before.steps != after.steps and after.lr_schedule != "constant":
        yield f"the learning rate jumps to the {after.lr_schedule} schedule of {after.steps:,} steps"
    if "8bit" in after.optimizer:
        if "8bit" not in before.optimizer:
            yield "the optimizer's moments are rounded to 8 bits"
        elif (before.zero, before.gpus) != (after.zero, after.gpus):
            yield "the optimizer's 8-bit moments are packed anew, which rounds them once more"
    if before.seq_len != after.seq_len:
        yield "until its end this epoch is read in another order: some of its text twice, some not at all"
    if before.gpus != after.gpus and max(new.model.dropout, new.model.score_dropout or 0.0) > 0:
        yield "dropout draws other random numbers on another number of ranks"
    if before.quantization != after.quantization:
        yield f"the frozen weights are kept as {after.quantization}, which rounds them anew"
