"""Starts the lead of a run over hosts, which starts everything else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from llmtop.presets.errors import JobFailedError
from llmtop.profiler.record.hosts import Hosts, write_hosts
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.launch import start_supervisor


def start_over_hosts(run: RunDir, hosts: Hosts, variables: Mapping[str, str]) -> int:
    """Start the lead of a new run; its pid. What `hosts` names of the environment it hands on to every host.

    `variables` stand in it on top of this process's. Raises as `start_supervisor`.
    """
    try:
        write_hosts(run, hosts)
    except OSError as error:
        raise JobFailedError(
            f"run {run.run_id} was not started",
            why=f"{run.path} cannot be written: {error.strerror or error}",
            fix="free some space there",
        ) from error
    with environment_with(variables):
        return start_supervisor(run)


@contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """This process's environment with these variables on top; afterwards as it was before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
