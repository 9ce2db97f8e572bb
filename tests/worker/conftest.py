"""Ranks for the GPU tests, forked from a process that has imported the libraries once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.forkserver import ForkServer


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[ForkServer]:
    with ForkServer(on_cpu=False) as server:
        yield server
