"""Supervisors and ranks by forking: `python -m llmtop.trainer.worker.nest`, for short runs in a row.

A rank spends most of its start on loading libraries. This process loads them once, without touching CUDA,
and makes each run by two forks: the supervisor, in a session of its own, and as its children the ranks. Both
do what they do when they are started as commands, and outlive this process as they do then.

The first line of stdin is the spec of a run like those to come; each further one is the folder of a run, and
is answered on stdout with its supervisor's pid. It ends when stdin does.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import select
import signal
import sys
import time
from functools import partial
from pathlib import Path

import msgspec

from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.trainer import supervise
from llmtop.trainer.tune.nest import Answer
from llmtop.trainer.worker.forking import cuda_touched, end_after, forget_nvml, let_torchao_in
from llmtop.trainer.worker.seats import Seat, SeatedRanks, redirect

_TURN_SECONDS = 0.2
_OF_OTHER_SETTINGS = ("deepspeed.ops.adam", "accelerate", "flash_attn")
"""What a run may need that differs from the first only in what a search varies, and that asks no device."""


def load(spec: RunSpec) -> None:
    """What a rank of such a run imports, but for what asks the device."""
    from llmtop.trainer.worker.build import import_model_code
    from llmtop.trainer.worker.session import quiet_libraries

    quiet_libraries()
    import_model_code(spec, off_device=not spec.on_cpu)
    for name in _OF_OTHER_SETTINGS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def serve(orders: int, answers: int) -> None:
    """Until the orders end. One thread: a fork copies only the one that makes it."""
    unread, open_ = b"", True
    while open_:
        ready, _, _ = select.select([orders], [], [], _TURN_SECONDS)
        if ready:
            piece = os.read(orders, 1 << 16)
            open_ = bool(piece)
            *lines, unread = (unread + piece).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    folder = Path(os.fsdecode(line))
                    end_after(partial(_become_supervisor, folder, (orders, answers)))
                _answer(answers, Answer(pid=pid))
        _reap()


def _reap() -> None:
    """Supervisors that have ended must not stay as zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _become_supervisor(folder: Path, close: tuple[int, ...]) -> int:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor in close:
        os.close(descriptor)
    run = RunDir.open(folder)
    redirect(run.log_path(SUPERVISOR))
    # Before anything that a fork would not survive, as NVML.
    seats = [Seat() for _ in range(run.spec().world_size)]
    return supervise.main([str(folder)], ranks=SeatedRanks(seats))


def _answer(answers: int, answer: Answer) -> None:
    os.write(answers, msgspec.json.encode(answer) + b"\n")


def _first_line(orders: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(orders, 1)
        if not byte:
            break
        line += byte
    return line


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders, answers = os.dup(0), os.dup(1)
    # What libraries print must not get between the answers.
    os.dup2(2, 1)
    began = time.monotonic()
    let_torchao_in(False)
    load(msgspec.json.decode(_first_line(orders), type=RunSpec))
    touched = cuda_touched()
    if touched:
        _answer(answers, Answer(problem=touched))
        return 1
    forget_nvml()
    # Collected objects of the parent would be written to, and so copied, in every rank.
    gc.collect()
    gc.freeze()
    _answer(answers, Answer(loaded_seconds=time.monotonic() - began))
    serve(orders, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
