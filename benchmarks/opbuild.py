"""Builds the ops that a run would load, and nothing else. Called by the zygote in place of the worker."""

from __future__ import annotations

from pathlib import Path

from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.ops import ops_of
from llmtop.trainer.worker.opbuild import build_ops


def main(arguments: list[str]) -> None:
    build_ops(ops_of(RunDir.open(Path(arguments[0])).deepspeed_config()), print)
