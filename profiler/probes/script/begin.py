"""What is done when a training library has been imported. Nothing of torch is loaded for it yet.

Called in the middle of the libraries' own imports, so what needs them waits for the first call that trains.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from llmtop.profiler.probes.script import importhook
from llmtop.profiler.probes.script.importhook import guarded

_started = False
"""Whether something trains in this process and is watched: one thing a process."""


def wait_for_training() -> None:
    """As the hook does at the start of a process, but late: the libraries may be there already."""
    importhook.install()
    for name, function in importhook.AFTER.items():
        if name in sys.modules:
            guarded(function, sys.modules[name])


def deepspeed_imported(module: ModuleType) -> None:
    """Engines that are made from now on are watched."""
    made_by: Any = module.initialize

    @functools.wraps(made_by)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = made_by(*args, **kwargs)
        guarded("engine_made", made[0])
        return made

    module.initialize = initialize  # type: ignore[attr-defined]


def optimizers_imported(module: ModuleType) -> None:
    """The first optimizer that steps is watched, unless an engine is."""

    def first_step(optimizer: Any, *_: Any) -> None:
        handle.remove()
        guarded("optimizer_steps", optimizer)

    handle = module.register_optimizer_step_post_hook(first_step)


def engine_made(engine: Any) -> None:
    global _started
    if not _started:
        _started = True
        from llmtop.profiler.probes.attach import attach

        attach(engine)


def optimizer_steps(optimizer: Any) -> None:
    global _started
    if not _started:
        _started = True
        from llmtop.profiler.probes.script.plain import attach_optimizer

        attach_optimizer(optimizer)
