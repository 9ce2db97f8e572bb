"""A recorded run that was changed twice while it went on."""

from __future__ import annotations

from pathlib import Path

from llmtop.profiler.record.changeevents import ChangeApplied, ChangeAsked, KeyChange
from llmtop.profiler.record.rundir import RunDir
from tests.recorded import Recorder
from tests.recorded_spec import recorded_prediction, recorded_spec


def make_changed_run(root: Path) -> RunDir:
    """Twelve steps as launched, twelve with micro-batch 8, twelve with micro-batch 8 and checkpointing."""
    specs = [
        recorded_spec("cpu", steps=36),
        recorded_spec("cpu", steps=36, micro_batch=8),
        recorded_spec("cpu", steps=36, micro_batch=8, gradient_checkpointing=True),
    ]
    run = RunDir.create(root, specs[0], recorded_prediction(specs[0]), {})
    recorder = Recorder(run, specs[0], 1.7e9)
    recorder.start()
    keys = [KeyChange(key="micro_batch", old=4, new=8), KeyChange(key="gradient_checkpointing", new=True)]
    for number, spec in enumerate(specs):
        if number:
            assert run.add_setting(spec, recorded_prediction(spec), {}) == number
            recorder.supervisor.write(ChangeAsked(setting=number, changes=(keys[number - 1],)))
            recorder.time.advance(0.1)
            for writer in recorder.ranks:
                writer.write(ChangeApplied(setting=number, step=12 * number + 1))
            recorder.spec = spec
            recorder.steady_seconds *= 2
        for step in range(12 * number + 1, 12 * number + 13):
            recorder.step(step)
    recorder.end("completed", 36)
    recorder.close()
    return run
