"""Steps that were made again in smaller parts, and runs that are started again so: as settings of the run."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.halving import halved
from llmtop.profiler.oom.allocations import identify
from llmtop.profiler.oom.message import short_message
from llmtop.profiler.record.changeevents import ChangeApplied
from llmtop.profiler.record.events import AnyEvent, RankFailed
from llmtop.profiler.record.failureevents import MemoryShortage
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.supervisor.progress import Progress
from llmtop.trainer.supervisor.relaunch import tell_change


class _Setting(Struct, frozen=True, kw_only=True):
    number: int
    before: int


class Healer:
    def __init__(self, run: RunDir, write: Callable[[AnyEvent], object], log: Callable[[str], None]) -> None:
        self._run = run
        self._write = write
        self._log = log
        self._step = 0
        """The last step that was taken into the record."""

    def poll(self, progress: Progress) -> bool:
        """Take a step into the record that all ranks have made again; whether there was one."""
        told = progress.healed
        steps = {event.step for event in told.values()}
        if len(told) < progress.world_size or len(steps) > 1 or not max(steps) > self._step:
            return False
        self._step = max(steps)
        rank, event = min(told.items(), key=lambda pair: (pair[1].stage is None, pair[0]))
        why = _why(self._run.spec(), rank, event.step, event.stage, event.message, event.shortage)
        try:
            setting = self._add(event.micro_batch, event.grad_accum)
            self._run.put_in_force(setting.number)
        except (LlmtopError, OSError) as error:
            # The ranks train on it all the same; what is shown is of the setting before.
            self._log(f"the smaller micro-batch since step {event.step} cannot be recorded: {error}")
            return False
        tell_change(self._run, setting.before, setting.number, self._write, restage=False, why=why)
        self._write(ChangeApplied(setting=setting.number, step=event.step))
        return True

    def relaunch(self, failure: RankFailed, rank: int) -> str:
        """Put half the micro-batch in force for ranks that are to be started again; why, in words.

        Empty where it cannot be halved, or memory ran out on the host, which a smaller batch does not help.
        """
        options = self._run.spec().options
        sizes = halved(options.micro_batch, options.grad_accum)
        on_host = failure.shortage is not None and failure.shortage.on_host
        if sizes is None or on_host or failure.error_type != "OutOfMemoryError":
            return ""
        why = _why(
            self._run.spec(),
            rank,
            failure.step,
            failure.stage,
            short_message(failure.message),
            failure.shortage,
        )
        try:
            setting = self._add(*sizes)
            self._run.put_in_force(setting.number, ended_on=setting.before)
        except (LlmtopError, OSError) as error:
            self._log(f"the run is not healed: {error}")
            return ""
        return why

    def _add(self, micro_batch: int, grad_accum: int) -> _Setting:
        # The prediction is a tenth of a second of imports that few runs need.
        from llmtop.profiler.memory.predict import predict_with_suggestions
        from llmtop.trainer.dsconfig import deepspeed_config

        before, spec = self._run.in_force().setting, self._run.spec()
        options = replace(spec.options, micro_batch=micro_batch, grad_accum=grad_accum)
        smaller = replace(spec, options=options)
        number = self._run.add_setting(smaller, predict_with_suggestions(smaller), deepspeed_config(smaller))
        return _Setting(number=number, before=before)


def _why(
    spec: RunSpec,
    rank: int,
    step: int | None,
    stage: str | None,
    message: str,
    shortage: MemoryShortage | None,
) -> str:
    """As `rank 1 ran out of memory in backward of step 5: ...`."""
    where = f" in {stage}" if stage else ""
    when = f" of step {step:,}" if step is not None else ""
    known = identify(spec, shortage, stage) if shortage is not None else ()
    what = f"; it was {' or '.join(one.name for one in known)}" if known else ""
    return f"rank {rank} ran out of memory{where}{when}: {message}{what}"
