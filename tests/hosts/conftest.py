"""The lab that most tests of hosts take place in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.in_lab import tidy_lab
from tests.hosts.lab import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with tidy_lab(tmp_path) as made:
        yield made
